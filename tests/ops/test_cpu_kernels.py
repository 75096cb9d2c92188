"""The C++ kernels of linear, paged_attention and sample against the references in float64, at every instruction level.

A level is a way to compile the same sources: for this machine, without AMX, and plain C++ for the oldest x86-64 (or
whatever else the machine is). The shared suite covers the ops' cases; here is what only these kernels can get wrong.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphllm.config import Bucket, Target
from graphllm.ir.kernels import CKernel, bind_symbol, c_kernel, compiler_command
from graphllm.ir.op import Site
from graphllm.ops.linear import linear
from graphllm.ops.linear.cpu import streaming_linear
from graphllm.ops.paged_attention import paged_attention
from graphllm.ops.paged_attention.cpu import cpu_paged_attention
from graphllm.ops.sample import sample
from graphllm.ops.sample.cpu import cpu_sample

SYMBOLS = ("graphllm_linear", *(f"graphllm_{op}_{t}" for op in ("paged_attention", "sample") for t in ("f32", "bf16")))
KERNELS: list[CKernel] = [c_kernel(symbol) for symbol in SYMBOLS]
OLDEST = ["-march=x86-64"] if platform.machine() == "x86_64" else []
LEVELS = {"native": [], "no-amx": ["-mno-amx-tile", "-mno-amx-bf16"], "generic": [*OLDEST, "-DGRAPHLLM_GENERIC"]}


def _host_has(flag: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and flag in cpuinfo.read_text().split()


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Binds the kernels to a library compiled for the level."""
    if request.param == "no-amx" and not _host_has("amx_bf16"):
        pytest.skip("the native level is the same here")
    sources = sorted({k.source for k in KERNELS})
    output = tmp_path_factory.mktemp("kernels") / f"{request.param}.so"
    subprocess.run([*compiler_command(sources, output), *LEVELS[request.param]], check=True)  # the last -march counts
    library = ctypes.CDLL(str(output))
    before = [k._function for k in KERNELS]
    for k in KERNELS:
        k._function = bind_symbol(library, k.symbol, k.argument_types)
    yield request.param
    for k, function in zip(KERNELS, before, strict=True):
        k._function = function


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()


# ---- linear


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 17, 33, 50, 64, 65, 130])
def test_linear_any_size(level: str, threads: int, rows: int) -> None:
    """Rows in every tile count, K and N that end inside a tile, strided x and weights, with and without bias."""
    torch.manual_seed(rows)
    for out, inner in ((48, 64), (1, 8), (33, 72), (15, 33), (130, 61), (576, 896), (40, 4864)):
        x = torch.randn(rows, inner + 8).bfloat16()[:, :inner]
        weight = (torch.randn(out, inner + 4) * inner**-0.5).bfloat16()[:, :inner]
        for bias in (None, torch.randn(out).bfloat16()):
            reference = linear(x.double(), weight.double(), None if bias is None else bias.double())
            assert _error(streaming_linear(x, weight, bias), reference) < 4e-3, (out, inner)


def test_linear_without_rows(level: str) -> None:
    assert streaming_linear(torch.empty(0, 32).bfloat16(), torch.randn(16, 32).bfloat16()).shape == (0, 16)


def test_linear_is_bitwise_the_same_for_any_thread_count(level: str) -> None:
    x, weight = torch.randn(7, 896).bfloat16(), torch.randn(1000, 896).bfloat16()
    results = []
    before = torch.get_num_threads()
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        results.append(streaming_linear(x, weight))
    torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


def _linear_site(arch: tuple[str, ...], dtype: torch.dtype, tokens: int) -> Site:
    args = {"x_TI": torch.empty(tokens, 32, dtype=dtype), "weight_OI": torch.empty(8, 32, dtype=dtype), "bias_O": None}
    return Site(args, Target("cpu", arch), Bucket("decode", tokens, tokens))


def test_linear_is_chosen_only_where_it_is_faster() -> None:
    supports = linear.impls["cpu_stream"].supports
    assert supports(_linear_site(("avx512_bf16",), torch.bfloat16, 8))
    assert not supports(_linear_site(("avx2",), torch.bfloat16, 8))
    assert not supports(_linear_site(("avx512_bf16",), torch.float32, 8))
    assert not supports(_linear_site(("avx512_bf16",), torch.bfloat16, 1024))


# ---- paged_attention


def _batch(
    sequences: list[tuple[int, int]], heads: tuple[int, int, int], page: int, dtype: torch.dtype, pad: int = 0
) -> dict[str, object]:
    """A ragged batch: (query rows, length) of each sequence; q, k, v are slices of one tensor. What no token has been
    written to is NaN, as uninitialized memory may be."""
    H, K, E = heads
    T = sum(n for n, _ in sequences) + pad
    qkv = torch.randn(T, (H + 2 * K) * E).to(dtype)
    q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, K * E, K * E], 1))
    pages = [-(-length // page) for _, length in sequences]
    order = torch.randperm(sum(pages) + 3).int()
    cache = torch.full((len(order), 2, K, page, E), torch.nan).to(dtype)
    table = torch.zeros(len(sequences), max(1, *pages) + 1, dtype=torch.int32)
    used, starts = 0, [0]
    for s, (n, length) in enumerate(sequences):
        table[s, : pages[s]] = order[used : used + pages[s]]
        used += pages[s]
        starts.append(starts[-1] + n)
        for position in range(length - n):
            at = table[s, position // page]
            cache[at, :, :, position % page] = torch.randn(2, K, E).to(dtype)
    return {
        "q_THE": q, "k_TKE": k, "v_TKE": v, "kv_cache": cache, "block_table": table,
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "seq_len": torch.tensor([length for _, length in sequences], dtype=torch.int32), "scale": E**-0.5,
    }  # fmt: skip


def _check_attention(args: dict[str, object], tolerance: float) -> None:
    names = ("q_THE", "k_TKE", "v_TKE", "kv_cache")
    exact = args | {n: args[n].double() for n in names}  # type: ignore[attr-defined]
    exact["kv_cache"] = exact["kv_cache"].nan_to_num()  # the reference multiplies what it masks by 0
    reference = paged_attention(**exact)
    out = cpu_paged_attention(**args)  # type: ignore[arg-type]
    rows = int(args["query_start"][-1])  # type: ignore[index]
    assert torch.equal(args["kv_cache"].double().nan_to_num(), exact["kv_cache"])  # type: ignore[attr-defined]
    assert torch.isfinite(out).all()
    if rows:
        assert _error(out[:rows], reference[:rows]) < tolerance


TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
RAGGED = {
    "decode": [(1, 1), (1, 64), (1, 65), (0, 0), (1, 130)],
    "decode-long": [(1, 1700)],
    "prompt": [(150, 150)],
    "mixed": [(1, 77), (30, 95), (0, 0), (130, 130), (1, 1), (9, 200)],
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch", RAGGED)
def test_attention_batches(level: str, threads: int, batch: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _check_attention(_batch(RAGGED[batch], (14, 2, 64), 16, dtype, pad=3), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(1, 1, 16), (4, 4, 40), (24, 1, 72), (6, 3, 96), (8, 1, 128), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("page", [1, 5, 16, 64])
def test_attention_shapes(level: str, heads: tuple[int, int, int], page: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _check_attention(_batch([(1, 100), (37, 70), (2, 2)], heads, page, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [1, 16, 17, 100])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_attention_window_and_softcap(level: str, window: int, softcap: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for sequences in ([(1, 300), (1, 5)], [(140, 200), (1, 90), (70, 70)]):
        args = _batch(sequences, (4, 2, 32), 16, dtype) | {"window": window, "softcap": softcap}
        _check_attention(args, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_of_large_scores(level: str, dtype: torch.dtype) -> None:
    """Scores in the hundreds and a negative scale: the softmax neither overflows nor loses its maximum."""
    torch.manual_seed(0)
    for scale in (4.0, -4.0):
        args = _batch([(1, 300), (80, 80)], (4, 2, 32), 16, dtype) | {"scale": scale}
        _check_attention(args, 2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_attention_of_nothing(level: str) -> None:
    _check_attention(_batch([(0, 0), (0, 0)], (2, 1, 32), 16, torch.bfloat16, pad=4), 0)


# ---- sample


Request = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def _requests(rows: list[Request], V: int, spread: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    S = len(rows)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {
        "logits_SV": (torch.randn(S, V + 3) * spread).to(dtype)[:, :V],
        "temperature_S": temperature.float(), "top_k_S": top_k.int(), "top_p_S": top_p.float(),
        "min_p_S": min_p.float(), "seed_S": torch.randint(-(2**62), 2**62, (S,)),
        "draw_S": torch.randint(0, 4096, (S,), dtype=torch.int32),
    }  # fmt: skip


ROWS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.5, 0, 1.0, 0.05),
    (1.0, 1, 0.5, 0.02),
    (2.0, 400, 0.99, 0.001),
    (1.0, 0, 0.999, 0.0),
    (1.0, 10**6, 1.0, 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("V", "spread"), [(7, 1.0), (33, 2.0), (5000, 4.0), (5000, 0.02), (20011, 1.0), (9000, 30.0)])
def test_sample_draws_as_the_reference(level: str, threads: int, V: int, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(V)
    for _ in range(3):
        args = _requests(ROWS, V, spread, dtype)
        assert torch.equal(cpu_sample(**args), sample(**args))


def test_sample_greedy_takes_the_lowest_of_equals_and_no_nan(level: str, threads: int) -> None:
    logits = torch.zeros(5, 3000)
    logits[1, [7, 2900]] = 1.0
    logits[2, 40:] = torch.nan
    logits[2, 20] = 2.0
    logits[3] = -torch.inf
    logits[4] = torch.nan
    args = _requests([ROWS[0]] * 5, 3000, 1.0, torch.float32) | {"logits_SV": logits}
    assert cpu_sample(**args).tolist() == [0, 7, 20, 0, 0]


def test_sample_ignores_nan_and_hidden_tokens(level: str) -> None:
    args = _requests(ROWS, 4000, 2.0, torch.float32)
    args["logits_SV"][:, ::3] = torch.nan
    args["logits_SV"][:, 1::3] = -torch.inf
    assert torch.equal(cpu_sample(**args), sample(**args))


# ---- under a tracer


def test_kernels_trace_to_one_call() -> None:
    """With symbolic sizes each implementation leaves its kernel call, and no guard on data, in the graph."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x, weight = torch.empty(5, 64, dtype=torch.bfloat16), torch.empty(48, 64, dtype=torch.bfloat16)
        args = _requests(ROWS, 40, 1.0, torch.bfloat16)
        q, k = torch.empty(5, 4, 32, dtype=torch.bfloat16), torch.empty(5, 2, 32, dtype=torch.bfloat16)
        cache = torch.empty(9, 2, 2, 16, 32, dtype=torch.bfloat16)
        table, starts = torch.empty(3, 4, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
        lengths = torch.empty(3, dtype=torch.int32)

    def all_three(*t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = cpu_paged_attention(*t[2:4], t[3], *t[4:8], 0.2)
        return streaming_linear(t[0], t[1]), attended, cpu_sample(*t[8:])

    graph = make_fx(all_three, tracing_mode="symbolic")(x, weight, q, k, cache, table, starts, lengths, *args.values())
    called = {n.target._schema.name for n in graph.graph.nodes if "graphllm_c" in str(n.target)}
    names = ("graphllm_linear", "graphllm_paged_attention_bf16", "graphllm_sample_bf16")
    assert called == {f"graphllm_c::{name}" for name in names}
