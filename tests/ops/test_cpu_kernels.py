"""The C++ kernels against the references in float64, at every instruction level.

A level is a way to compile the same sources: for this machine, without AMX, and plain C++ for the oldest x86-64 (or
whatever else the machine is). The shared suite covers the ops' cases; here is what only these kernels can get wrong.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphllm.config import Bucket, ConfigError, Target
from graphllm.host.compiler import compiler_command
from graphllm.ir.kernels import CKernel, c_kernel
from graphllm.ir.op import CallSite
from graphllm.ops.attention.encoder_attention import encoder_attention
from graphllm.ops.attention.encoder_attention.cpu import cpu_encoder_attention
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.paged_attention.cpu import cpu_paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows, Scores
from graphllm.ops.gemm.fused_linear import fused_linear
from graphllm.ops.gemm.fused_linear.cpu import gated_linear
from graphllm.ops.gemm.linear import linear
from graphllm.ops.gemm.linear.cpu import float_linear, streaming_linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.fused_moe.cpu import experts_in_turn
from graphllm.ops.moe.fused_moe.operands import ExpertLora, Experts, Route
from graphllm.ops.sampling.process_logits import process_logits
from graphllm.ops.sampling.record_tokens.cpu import cpu_record_tokens
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample.op import uniform_bits
from graphllm.ops.sampling.token_logprobs import token_logprobs
from graphllm.ops.sampling.token_logprobs.cpu import cpu_token_logprobs
from tests.ops.implementations import implementation
from tests.ops.levels import LEVELS, PARAMS

CompiledFor = Callable[[Sequence[CKernel], Sequence[str]], AbstractContextManager[Path]]
cpu_sample, cpu_process_logits = implementation(sample, "cpu"), implementation(process_logits, "cpu")
TYPED = ("fused_moe", "paged_attention", "encoder_attention", "sample", "process_logits", "token_logprobs")
SYMBOLS = (
    *("graphllm_linear", "graphllm_linear_gated", "graphllm_linear_float", "graphllm_record_tokens"),
    *(f"graphllm_{op}_{t}" for op in TYPED for t in ("f32", "bf16")),
)
KERNELS: list[CKernel] = [c_kernel(symbol) for symbol in SYMBOLS]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module", params=PARAMS)
def level(request: pytest.FixtureRequest, compiled_for: CompiledFor) -> Iterator[str]:
    """Binds the kernels to a library compiled for the level."""
    with compiled_for(KERNELS, LEVELS[request.param]):
        yield request.param


def _error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()


# ---- linear


@functools.cache
def _known_products(rows: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """x, weight, bias and the product of them in float64, once for all levels and counts of threads."""
    torch.manual_seed(rows)
    found = []
    for out, inner in ((48, 64), (1, 8), (33, 72), (15, 33), (130, 61), (576, 896), (40, 4864), (37, 4870)):
        x = torch.randn(rows, inner + 8).bfloat16()[:, :inner]
        weight = (torch.randn(out, inner + 4) * inner**-0.5).bfloat16()[:, :inner]
        for bias in (None, torch.randn(out).bfloat16()):
            reference = linear(x.double(), weight.double(), None if bias is None else bias.double())
            found.append((x, weight, bias, reference))
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65, 130, 300])
def test_linear_any_size(level: str, threads: int, rows: int) -> None:
    """Rows in every tile count, K and N that end inside a tile, strided x and weights, with and without bias."""
    for x, weight, bias, reference in _known_products(rows):
        assert _error(streaming_linear(x, weight, bias), reference) < 4e-3, weight.shape


@functools.cache
def _known_gated(rows: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Arguments and references, once for all levels and counts of threads."""
    torch.manual_seed(rows)
    found = []
    for out, inner in ((1, 8), (17, 72), (48, 64), (31, 33), (300, 896), (40, 2600)):
        x = torch.randn(rows, inner + 8).bfloat16()[:, :inner]
        weight = (torch.randn(2 * out, inner + 4) * inner**-0.5).bfloat16()[:, :inner]
        for bias in (None, torch.randn(2 * out).bfloat16()):
            given = {"x_TI": x, "weight_OI": weight, "bias_O": bias}
            wide: dict[str, Any] = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            found.append((given, fused_linear.reference(**wide, gated=True)))
    return found


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 16, 17, 33, 130])
def test_gated_linear_any_size(level: str, threads: int, rows: int) -> None:
    """Halves that end inside a block, rows on both sides of the two ways to compute."""
    for given, reference in _known_gated(rows):
        found = gated_linear(**given)
        assert found.shape == reference.shape == (rows, given["weight_OI"].shape[0] // 2)
        if rows:
            assert _error(found, reference) < 1e-2, given["weight_OI"].shape


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


def _linear_site(arch: tuple[str, ...], dtype: torch.dtype, tokens: int) -> CallSite:
    args = {"x_TI": torch.empty(tokens, 32, dtype=dtype), "weight_OI": torch.empty(8, 32, dtype=dtype), "bias_O": None}
    return CallSite(args, Target("cpu", arch), Bucket("decode", tokens, tokens))


def test_linear_is_chosen_only_where_it_is_faster() -> None:
    supports = linear.impls["cpu_stream"].supports
    assert supports(_linear_site(("avx2", "avx512_bf16"), torch.bfloat16, 8))
    assert not supports(_linear_site(("avx2", "avx512_bf16"), torch.float32, 8))
    assert supports(_linear_site(("avx2", "avx512_bf16"), torch.bfloat16, 1024))
    assert supports(_linear_site(("amx_bf16", "avx2", "avx512_bf16"), torch.bfloat16, 128))
    assert supports(_linear_site(("amx_bf16", "avx2", "avx512_bf16"), torch.bfloat16, 1024))
    assert supports(_linear_site(("avx2",), torch.bfloat16, 128))
    assert supports(_linear_site(("avx2",), torch.bfloat16, 1024))
    assert not supports(_linear_site(("avx",), torch.bfloat16, 1))


# ---- fused_moe


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("T", "experts"), [(40, 4), (300, 2), (300, 7)])
def test_experts_with_many_rows(level: str, threads: int, T: int, experts: int, dtype: torch.dtype) -> None:
    """More rows than dot products serve, and more than AMX takes without packing; experts that nobody chose."""
    draw = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    given = [t.to(dtype) for t in (normal(T, 80), normal(8, 208, 80) / 9, normal(8, 80, 104) / 10)]
    weights, chosen = torch.softmax(normal(T, 2), -1), normal(T, experts).topk(2, -1).indices.int()
    found = experts_in_turn(given[0], Experts(*given[1:]), Route(weights, chosen))
    assert _error(found, fused_moe(*(t.double() for t in given), weights, chosen)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", [3, 150])
def test_adapters_of_experts(level: str, threads: int, T: int, dtype: torch.dtype) -> None:
    """Sizes that end inside a vector; tokens of two adapters and of none."""
    draw = torch.Generator().manual_seed(T)
    sizes = ((T, 44), (8, 2 * 52, 44), (8, 44, 52), (3, 8, 2 * 5, 44), (3, 8, 5, 2 * 52), (3, 8, 5, 52), (3, 8, 5, 44))
    x, first, second, *tables = (torch.randn(s, generator=draw).div(s[-1] ** 0.5).to(dtype) for s in sizes)
    weights, chosen = torch.softmax(torch.randn(T, 2, generator=draw), -1), torch.rand(T, 8).topk(2, -1).indices.int()
    ids = torch.arange(T, dtype=torch.int32) % 3
    for table in tables:
        table[0] = float("nan")  # never read
    route = Route(weights, chosen)
    found = experts_in_turn(x, Experts(first, second), route, ExpertLora(*tables, ids))
    wide = ExpertLora(*(t.double() for t in tables), ids)
    truth = fused_moe(x.double(), Experts(first.double(), second.double()), route, wide)
    assert _error(found, truth) < TOLERANCE[dtype]


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
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor([length for _, length in sequences], dtype=torch.int32), "scale": E**-0.5,
    }  # fmt: skip


def _exact_attention(args: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's result in float64, and the cache that it leaves."""
    names = ("q_THE", "k_TKE", "v_TKE", "kv_cache")
    exact = args | {n: args[n].double() for n in names}  # type: ignore[attr-defined]
    return paged_attention(**exact), exact["kv_cache"].nan_to_num()  # so that equal caches are equal


def _check_attention(
    args: dict[str, object], tolerance: float, exact: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    reference, written = exact or _exact_attention(args)
    out = implementation(paged_attention, "cpu")(**args)
    rows = int(args["query_start_loc"][-1])  # type: ignore[index]
    assert torch.equal(args["kv_cache"].double().nan_to_num(), written)  # type: ignore[attr-defined]
    assert torch.isfinite(out).all()
    if rows:
        assert _error(out[:rows], reference[:rows]) < tolerance


RAGGED = {
    "decode": [(1, 1), (1, 64), (1, 65), (0, 0), (1, 130)],
    "decode-long": [(1, 1700)],
    "decode-uneven": [(1, 2100), (1, 3), (0, 0), (1, 700), (1, 64)],  # a thread ends inside of a sequence
    "prompt": [(150, 150)],
    "mixed": [(1, 77), (30, 95), (0, 0), (130, 130), (1, 1), (9, 200)],
}


@functools.cache
def _known_batch(batch: str, dtype: torch.dtype) -> tuple[dict[str, object], tuple[torch.Tensor, torch.Tensor]]:
    """Arguments and what the reference makes of them, once for all levels and counts of threads."""
    torch.manual_seed(0)
    args = _batch(RAGGED[batch], (14, 2, 64), 16, dtype, pad=3)
    return args, _exact_attention(args)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch", RAGGED)
def test_attention_batches(level: str, threads: int, batch: str, dtype: torch.dtype) -> None:
    args, exact = _known_batch(batch, dtype)
    _check_attention(args | {"kv_cache": args["kv_cache"].clone()}, TOLERANCE[dtype], exact)  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_with_sinks(level: str, threads: int, dtype: torch.dtype) -> None:
    """In decode, shared among threads, and in prompts; next to sinks that outweigh everything or nothing."""
    torch.manual_seed(0)
    for sequences, page in (([(1, 900), (1, 5)], 16), ([(60, 100), (1, 90)], 16), ([(1, 70), (9, 9)], 5)):
        sinks = torch.tensor([2.0, -300.0, 1.0, 300.0, 0.0, 5.0]).to(dtype)
        args = _batch(sequences, (6, 2, 32), page, dtype) | {"sinks_H": sinks, "window": 40 if page == 5 else 0}
        _check_attention(args, TOLERANCE[dtype])


def test_attention_of_nothing(level: str) -> None:
    _check_attention(_batch([(0, 0), (0, 0)], (2, 1, 32), 16, torch.bfloat16, pad=4), 0)


# ---- encoder_attention


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "window"), [((3, 3, 32), 0), ((4, 2, 72), 0), ((2, 2, 128), 17), ((1, 1, 64), 128)])
def test_attention_both_ways(
    level: str, threads: int, heads: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    """Sequences longer than an item, with last chunks that are not whole; what lies after the last row is never
    read."""
    torch.manual_seed(0)
    lengths = [1, 500, 0, 63, 64, 130]
    args = _batch([(n, n) for n in lengths], heads, 16, dtype)
    given = {n: args[n] for n in ("q_THE", "k_TKE", "v_TKE", "query_start_loc", "scale")} | {"window": window}
    exact = given | {n: given[n].double() for n in ("q_THE", "k_TKE", "v_TKE")}  # type: ignore[attr-defined]
    found = cpu_encoder_attention(**given)  # type: ignore[arg-type]
    assert _error(found, encoder_attention(**exact)) < TOLERANCE[dtype]


# ---- sample


Request = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def _requests(rows: list[Request], V: int, spread: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    S = len(rows)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {
        "logits_SV": (torch.randn(S, V + 3) * spread).to(dtype)[:, :V],
        "temperature_S": temperature.float(), "top_k_S": top_k.int(), "top_p_S": top_p.float(),
        "min_p_S": min_p.float(), "seed_S": torch.randint(-(2**62), 2**62, (S,)),
        "sample_index_S": torch.randint(0, 4096, (S,), dtype=torch.int32),
    }  # fmt: skip


ROWS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (0.8, 0, 0.9, 0.0), (1.5, 0, 1.0, 0.05),
    (1.0, 1, 0.5, 0.02), (2.0, 400, 0.99, 0.001), (1.0, 0, 0.999, 0.0), (1.0, 10**6, 1.0, 0.0),
]  # fmt: skip


@functools.cache
def _known_draws(V: int, spread: float, dtype: torch.dtype) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Requests and the reference's tokens, once for all levels and counts of threads."""
    torch.manual_seed(V)
    requests = [_requests(ROWS, V, spread, dtype) for _ in range(3)]
    return [(args, sample(**args)) for args in requests]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("V", "spread"), [(7, 1.0), (33, 2.0), (5000, 4.0), (5000, 0.02), (20011, 1.0), (9000, 30.0)])
def test_sample_draws_as_the_reference(level: str, threads: int, V: int, spread: float, dtype: torch.dtype) -> None:
    for args, expected in _known_draws(V, spread, dtype):
        assert torch.equal(cpu_sample(**args), expected)


def test_sample_greedy_takes_the_lowest_of_equals_and_no_nan(level: str, threads: int) -> None:
    logits = torch.zeros(5, 3000)
    logits[1, [7, 2900]] = 1.0
    logits[2, 40:] = torch.nan
    logits[2, 20] = 2.0
    logits[3] = -torch.inf
    logits[4] = torch.nan
    args = _requests([ROWS[0]] * 5, 3000, 1.0, torch.float32) | {"logits_SV": logits}
    assert cpu_sample(**args).tolist() == [0, 7, 20, -1, -1]


def test_sample_ignores_nan_and_hidden_tokens(level: str) -> None:
    args = _requests(ROWS, 4000, 2.0, torch.float32)
    args["logits_SV"][:, ::3] = torch.nan
    args["logits_SV"][:, 1::3] = -torch.inf
    assert torch.equal(cpu_sample(**args), sample(**args))


@functools.cache
def _known_choices(allowed: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]]:
    """Requests with numbers of allowed tokens, the tokens, and the reference's, once for all levels and threads."""
    torch.manual_seed(allowed)
    rows = [*ROWS, (1.0, 50, 0.9, 0.0), (0.7, 3000, 0.99, 0.1), (0.01, 5, 0.5, 0.0)]
    known = []
    for hidden in (-torch.inf, torch.nan):
        args = _requests(rows, 4000, 2.0, torch.float32)
        order = torch.rand(len(rows), 4000).argsort(dim=1)
        kept = torch.zeros(len(rows), 4000, dtype=torch.bool).scatter(1, order[:, :allowed], True)
        args["logits_SV"] = args["logits_SV"].masked_fill(~kept, hidden)
        known.append((args, kept, sample(**args)))
    return known


@pytest.mark.parametrize("allowed", [0, 1, 2, 19, 300])
def test_sample_never_chooses_a_banned_token(level: str, threads: int, allowed: int) -> None:
    """Every filter with fewer tokens left than its k, in float32 as the mask leaves them, with and without NaN."""
    for args, kept, expected in _known_choices(allowed):
        found = cpu_sample(**args)
        assert torch.equal(found, expected)
        if allowed:
            assert kept.gather(1, found[:, None].long()).all()
        else:
            assert (found == -1).all()


def _unmix(x: int) -> int:
    """The number that the random bits' finalizer turns into x."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) % 2**32
    return x ^ x >> 16


def test_sample_with_the_largest_random_number(level: str) -> None:
    """Where u would round to 1 the race is still finite, so a row's only token wins it."""
    seed = torch.zeros(1, dtype=torch.int64)
    draw = torch.tensor([_unmix((_unmix(2**32 - 1) - 499 * 0x9E3779B9) % 2**32)]).int()
    assert uniform_bits(seed, draw, 500)[0, 499] == 2**32 - 1
    logits = torch.full((1, 500), -torch.inf)
    logits[0, 499] = 1.0
    args = _requests([ROWS[1]], 500, 1.0, torch.float32) | {"logits_SV": logits, "seed_S": seed, "sample_index_S": draw}
    assert sample(**args).tolist() == [499]
    assert cpu_sample(**args).tolist() == [499]


_NUMBERS = """
#include "sampling/sample/cpu.cpp"
extern "C" void numbers(const std::uint32_t* bits, float* to, std::int64_t count) {
  using namespace graphllm;
  for (std::int64_t i = 0; i < count; i += kRegLanes) {
    Bits some;
    std::memcpy(&some, bits + i, sizeof some);
    const Reg found = uniform(some);
    std::memcpy(to + i, &found, sizeof found);
  }
}
"""


@pytest.mark.parametrize("name", PARAMS)
def test_random_numbers_of_sample(name: str, tmp_path: Path) -> None:
    """(bits + 1/2) / 2^32 below 1, each step rounded to float32. A sum in another order gives numbers that are off by a
    rounding too rarely for the tokens to show it."""
    (tmp_path / "numbers.cpp").write_text(_NUMBERS)
    library = tmp_path / "numbers.so"
    subprocess.run([*compiler_command([tmp_path / "numbers.cpp"], library), *LEVELS[name]], check=True)
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 1 << 22, dtype=np.uint32) >> random.integers(0, 32, 1 << 22, dtype=np.uint32)
    bits[:128] = [b % 2**32 for k in range(32) for b in (2**k - 1, 2**k, 2**k + 1, 2**32 - 2**k)]
    found = np.empty(len(bits), dtype=np.float32)
    ctypes.CDLL(str(library)).numbers(bits.ctypes, found.ctypes, ctypes.c_int64(len(bits)))
    expected = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


# ---- process_logits


def _adjustments(S: int, V: int, dtype: torch.dtype, on: bool) -> dict[str, torch.Tensor]:
    N, B = S + 1, 5
    off = torch.ones(S) if not on else torch.rand(S) + 0.5
    return {
        "logits_SV": (torch.randn(S, V + 3) * 3).to(dtype)[:, :V],
        "slot_S": torch.randperm(S).int(),
        "mask_row_S": torch.randperm(S).int() if on else torch.full((S,), -1, dtype=torch.int32),
        "mask_SW": torch.randint(-(2**31), 2**31, (S, -(-V // 32))).int(),
        "bias_count_S": torch.randint(0, B + 1, (S,)).int() * int(on),
        "repetition_S": off,
        "frequency_S": torch.randn(S) * int(on),
        "presence_S": torch.randn(S) * int(on),
        "counts_NV": (torch.randint(-9, 4, (N, V)).clamp(min=0) + torch.randint(0, 2, (N, V)) * (1 << 30)).int(),
        "bias_token_NB": torch.stack([torch.randperm(V)[:B] for _ in range(N)]).int(),
        "bias_value_NB": torch.randn(N, B) * 9,
        "drafts_T": torch.randint(-1, min(V, 9), (4 * S,)).int(),
        "logits_indices_S": torch.arange(S).int() * 4 + 3,
        "place_S": torch.randint(0, 4, (S,)).int(),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [5, 31, 32, 4096, 4097, 9003, 40000])
def test_process_logits_any_size(level: str, threads: int, V: int, dtype: torch.dtype) -> None:
    torch.manual_seed(V)
    args = _adjustments(7, V, dtype, True)
    args["logits_SV"][:, ::5] = torch.nan
    args["logits_SV"][:, 1::7] = -torch.inf
    exact = process_logits(**{n: t.double() if t.is_floating_point() else t for n, t in args.items()})
    torch.testing.assert_close(cpu_process_logits(**args).double(), exact, rtol=1e-6, atol=2e-6, equal_nan=True)


def test_process_logits_leaves_alone_what_is_off(level: str, threads: int) -> None:
    """Rows with everything off are copied bit by bit, and neither the mask nor the state is read: slot and lists are
    outside of anything that could be read."""
    args = _adjustments(6, 5000, torch.float32, False)
    args["logits_SV"][:, 3] = torch.nan
    args["slot_S"].fill_(2**31 - 1)
    assert torch.equal(cpu_process_logits(**args).view(torch.int32), args["logits_SV"].contiguous().view(torch.int32))


# ---- token_logprobs


@functools.cache
def _known_logprobs(
    S: int, V: int, k: int, spread: float, dtype: torch.dtype
) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Arguments and what the reference makes of them in float64, once for all levels and counts of threads."""
    torch.manual_seed(V)
    logits = (torch.randn(S, V + 3) * spread).to(dtype)
    known = []
    for hidden in (0, V // 3, V - 4):
        logits[:, torch.randperm(V)[:hidden]] = -torch.inf
        logits[:, torch.randperm(V)[: hidden // 2]] = torch.nan
        tokens, target, wanted = (torch.randint(-2, V, (S,)).clamp(min=-1).int() for _ in range(3))
        target[::2], wanted[0] = -1, 0
        args = (logits.clone()[:, :V], tokens, target, wanted)
        known.append((args, token_logprobs(args[0].double(), *args[1:], k).float()))
    return known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("S", "V", "k"), [(1, 70000, 20), (3, 70001, 7), (1, 15, 20), (6, 5003, 20), (2, 40000, 0)])
@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_token_logprobs(level: str, threads: int, S: int, V: int, k: int, spread: float, dtype: torch.dtype) -> None:
    """Rows in parts and whole, k of 0 and beyond the vocabulary, ties, NaN, banned tokens; ids and ranks exactly."""
    for args, exact in _known_logprobs(S, V, k, spread, dtype):
        found = cpu_token_logprobs(*args, k)
        ids = [1, *range(2 + k, 2 + 2 * k)]
        assert torch.equal(found[:, ids], exact[:, ids])
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=2e-6)


# ---- record_tokens


def test_record_tokens(level: str) -> None:
    last, counts = torch.full((5,), 9, dtype=torch.int32), torch.zeros(5, 4, dtype=torch.int32)
    counts[1, 2] = 1 << 30
    tokens, slot, counted = (torch.tensor(x, dtype=torch.int32) for x in ([2, -1, 3, 1], [1, 0, 3, 4], [1, 1, 0, 0]))
    assert torch.equal(cpu_record_tokens(tokens, slot, slot, counted, last, counts), tokens)
    assert last.tolist() == [0, 2, 9, 3, 1]
    assert counts[1].tolist() == [0, 0, (1 << 30) + 1, 0]
    assert int(counts.sum()) == (1 << 30) + 1
    scrap, kept = torch.full((4,), 4, dtype=torch.int32), torch.tensor([0, 0, 0, 4], dtype=torch.int32)
    cpu_record_tokens(tokens, scrap, kept, torch.ones_like(counted), last, counts)  # of drafts; the last is not kept
    assert counts[0].tolist() == [0, 0, 1, 1]
    assert int(counts[1:].sum()) == (1 << 30) + 1


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

        adjustments = _adjustments(9, 40, torch.bfloat16, True)
        experts = (torch.empty(8, 192, 64, dtype=torch.bfloat16), torch.empty(8, 64, 96, dtype=torch.bfloat16))
        routing = (torch.empty(5, 2), torch.empty(5, 2, dtype=torch.int32))

    def all_of_them(*t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = cpu_paged_attention(Rows(*t[2:4], t[3]), Paged(*t[4:8]), Scores(0.2))
        both_ways = cpu_encoder_attention(*t[2:4], t[3], t[6], 0.2)
        tokens, changed = cpu_sample(*t[8:15]), t[19:]
        scores = cpu_token_logprobs(changed[0], tokens, changed[1], changed[2], 5)
        last, counts = changed[1].clone(), changed[8].clone()
        recorded = cpu_record_tokens(tokens, changed[1], changed[1], changed[2], last, counts)
        mixed = experts_in_turn(t[0], Experts(*t[15:17]), Route(*t[17:19]))
        return streaming_linear(t[0], t[1]), attended, both_ways, mixed, cpu_process_logits(*changed), scores, recorded

    inputs = (x, weight, q, k, cache, table, starts, lengths, *args.values(), *experts, *routing)
    inputs = (*inputs, *adjustments.values())
    graph = make_fx(all_of_them, tracing_mode="symbolic")(*inputs)
    called = {n.target._schema.name for n in graph.graph.nodes if "graphllm_c" in str(n.target)}
    names = ("graphllm_linear", "graphllm_record_tokens", *(f"graphllm_{op}_bf16" for op in TYPED))
    assert called == {f"graphllm_c::{name}" for name in names}


# ---- deterministic mode

SOME = (1, 2, 3, 7, 8, 9, 16, 17, 33, 130)  # rows in a batch, from one on, of 200


@pytest.mark.parametrize("kernel", [streaming_linear, gated_linear, float_linear], ids=lambda k: k.__name__)
def test_rows_of_products_are_what_they_are_alone(
    level: str, threads: int, kernel: Callable[..., torch.Tensor]
) -> None:
    if kernel is float_linear and level == "generic":
        pytest.skip("asks for AVX2")
    torch.manual_seed(0)
    dtype = torch.float32 if kernel is float_linear else torch.bfloat16
    for out, inner in ((2, 8), (34, 72), (130, 61), (576, 896), (38, 4870)):
        x, weight = torch.randn(200, inner).to(dtype), (torch.randn(out, inner) * inner**-0.5).to(dtype)
        for bias in (None, torch.randn(out).to(dtype)):
            whole = kernel(x, weight, bias, invariant=True)
            exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            if kernel is gated_linear:
                gate, value = exact.chunk(2, 1)
                exact = torch.nn.functional.silu(gate) * value
            assert _error(whole, exact) < (3e-6 if dtype == torch.float32 else 1e-2)
            for rows in SOME:
                some = kernel(x[1 : 1 + rows], weight, bias, invariant=True)
                assert torch.equal(some, whole[1 : 1 + rows]), (out, inner, rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("H", "K", "E", "P"), [(14, 2, 64, 16), (4, 1, 24, 16), (34, 2, 64, 16), (6, 2, 128, 8)])
@pytest.mark.parametrize(("window", "softcap", "sunk"), [(0, 0.0, False), (20, 0.0, True), (37, 5.0, False)])
def test_rows_of_attention_are_what_they_are_alone(
    level: str,
    threads: int,
    dtype: torch.dtype,
    H: int,
    K: int,
    E: int,
    P: int,
    window: int,
    softcap: float,
    sunk: bool,
) -> None:
    """Prompts whole and by themselves, and in random chunks and single tokens in one batch."""
    draw = torch.Generator().manual_seed(H)
    lengths, S = (70, 150, 33), 3
    q, k, v = (torch.randn(S, 150, heads, E, generator=draw).to(dtype) for heads in (H, K, K))
    sinks = torch.randn(H, generator=draw).to(dtype) if sunk else None

    def run(steps: list[list[tuple[int, int]]]) -> torch.Tensor:
        blocks = -(-150 // P)
        cache, table = torch.zeros(S * blocks, 2, K, P, E, dtype=dtype), torch.arange(S * blocks).int().view(S, blocks)
        out, done = torch.zeros_like(q), [0] * S
        for step in steps:
            parts = [torch.cat([t[s, done[s] : done[s] + n] for s, n in step]) for t in (q, k, v)]
            starts = torch.tensor([0, *(n for _, n in step)]).cumsum(0).int()
            ends = torch.tensor([done[s] + n for s, n in step]).int()
            own = table[[s for s, _ in step]]
            scores = Scores(E**-0.5, window, softcap, sinks)
            rows = cpu_paged_attention(Rows(*parts), Paged(cache, own, starts, ends), scores, invariant=True)
            for (s, n), some in zip(step, rows.split([n for _, n in step]), strict=True):
                out[s, done[s] : done[s] + n] = some
                done[s] += n
        return out

    single = run([[(s, n)] for s, n in enumerate(lengths)])
    left, steps = list(lengths), []
    while any(left):
        sizes = [min(n, int(torch.randint(1, (2, 5, 40)[len(steps) % 3], (), generator=draw))) for n in left]
        steps.append([(s, n) for s, n in enumerate(sizes) if n])
        left = [n - taken for n, taken in zip(left, sizes, strict=True)]
    assert torch.equal(run(steps), single)


def test_log_probabilities_do_not_depend_on_other_rows(level: str, threads: int) -> None:
    logits = torch.randn(9, 50000)
    tokens, target, wanted = torch.arange(9).int(), torch.full((9,), -1).int(), torch.ones(9).int()
    whole = cpu_token_logprobs(logits, tokens, target, wanted, 5)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(cpu_token_logprobs(logits[one], tokens[one], target[one], wanted[one], 5), whole[one])


def test_an_argument_is_no_word_of_python(tmp_path: Path) -> None:
    """Generated code calls kernels with arguments by name."""
    source = tmp_path / "kernel.cpp"
    source.write_text("")
    with pytest.raises(ConfigError, match=r"kernel words_of_python: 'from' is a word of Python.*in the schema"):
        CKernel("words_of_python", "(Tensor x, SymInt from) -> ()", source)
