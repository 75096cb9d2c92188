"""The C++ kernels of GGUF blocks at every instruction level, against the numbers of the package `gguf`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch

from graphllm.host.libraries import Libraries
from graphllm.ir.kernels import CKernel, c_kernel
from graphllm.ops.embeddings.gguf_embedding.cpu import decoding_gguf_embedding
from graphllm.ops.encodings.gguf_blocks import TILED, tiles, untiled
from graphllm.ops.gemm.gguf_linear.cpu import streaming_gguf_linear
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.checkpoint.tensor_info import TensorInfo, WeightError
from graphllm.weights.encodings import encoding_of
from graphllm.weights.formats.gguf import fast_tiles
from graphllm.weights.loading.host_loader import host_loader
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.expr import Concat, Decode, Each, Encode, Expr, Read, Tie, Values
from graphllm.weights.plan.plan import Entry, WeightPlan
from tests.ops.levels import AMX, LEVELS, PARAMS
from tests.ops.rounding import MANY, TOLERANCE, gated, rounded_x

CompiledFor = Callable[[Sequence[CKernel], Sequence[str]], AbstractContextManager[Path]]
GROUP = {"q6_k": 16}  # inner entries that share a scale, where not 32
# Every way to keep codes, scales and minima; further types are made of the same parts.
FEW = ("q8_0", "q5_1", "q4_k", "q6_k")


def _kernels(kinds: Sequence[str]) -> list[CKernel]:
    return [
        c_kernel(f"graphllm_gguf_{op}_{kind}_{dtype}")
        for op in ("linear", "embedding")
        for kind in kinds
        for dtype in ("bf16", "f32")
    ]


@pytest.fixture(scope="module", params=PARAMS)
def library(request: pytest.FixtureRequest, compiled_for: CompiledFor) -> Iterator[Path]:
    """Binds the kernels to a library compiled for the level."""
    with compiled_for(_kernels(FEW), [*LEVELS[request.param], "-O1"]) as built:
        yield built


@pytest.fixture
def level(library: Path, request: pytest.FixtureRequest) -> str:
    """The level that the kernels are bound to."""
    return str(request.node.callspec.params["library"])


def _blocks(kind: str, rows: int, inner: int) -> torch.Tensor:
    """Rows of random bytes with normal numbers as scales and minima."""
    form, draw = TILED[kind], np.random.default_rng(rows)
    blocks, at = draw.integers(0, 256, (rows, inner // form.entries, form.nbytes), dtype=np.uint8), 0
    for field in form.fields:
        if field.unit == 2:
            halves = (draw.standard_normal(blocks.shape[:2]) * inner**-0.5 / 16).astype(np.float16)
            blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
        at += field.nbytes
    return torch.from_numpy(blocks.reshape(rows, -1))


def _numbers(blocks: torch.Tensor, kind: str) -> np.ndarray:
    found: np.ndarray = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    return found


class Known(NamedTuple):
    """A product, its operands drawn, and what it is with x kept and with x rounded in groups."""

    x: torch.Tensor
    tiles: torch.Tensor
    out: int
    bias: torch.Tensor | None
    kept: np.ndarray
    rounded: np.ndarray


@functools.cache
def _known(rows: int, kind: str) -> list[Known]:
    torch.manual_seed(rows)
    found = []
    for out, inner in ((15, 256), (33, 512), (130, 1280), (700, 256)):
        blocks = _blocks(kind, out, inner)
        weight = _numbers(blocks, kind).astype(np.float64)
        for dtype in TOLERANCE:
            if dtype != torch.bfloat16 and out != 33:
                continue
            x = torch.randn(rows, inner + 8).to(dtype)[:, :inner]
            bias = torch.randn(out).to(dtype) if out % 2 else None
            kept, rounded = (
                given @ weight.T + (0 if bias is None else bias.double().numpy())
                for given in (x.double().numpy(), rounded_x(x, GROUP.get(kind, 32)))
            )
            found.append(Known(x, tiles(blocks, kind), out, bias, kept, rounded))
    return found


def _check_products(kind: str, rows: int, keeps_x: bool) -> None:
    for x, packed, out, bias, kept, rounded in _known(rows, kind):
        truth = kept if keeps_x and rows >= MANY and x.dtype == torch.bfloat16 else rounded
        found = streaming_gguf_linear(x, packed, kind, out, bias)
        assert found.dtype == x.dtype
        error = np.linalg.norm(found.double().numpy() - truth) / np.linalg.norm(truth)
        assert error < TOLERANCE[x.dtype], (out, x.shape[1], x.dtype)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 12, 13, 31, 32, 49, 130])
def test_any_size(level: str, threads: int, rows: int, kind: str) -> None:
    """Rows in every tile size, outputs that end inside a tile, strided x, with a bias."""
    _check_products(kind, rows, level == "native" and AMX)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("rows", [1, 3, 13, 40])
def test_gate(level: str, threads: int, rows: int, kind: str) -> None:
    torch.manual_seed(rows)
    blocks = _blocks(kind, 2 * 80, 512)
    x, bias = torch.randn(rows, 512).bfloat16(), torch.randn(2 * 80).bfloat16()
    keeps_x = level == "native" and AMX and rows >= MANY
    of_x = x.double().numpy() if keeps_x else rounded_x(x, GROUP.get(kind, 32))
    truth = gated(of_x @ _numbers(blocks, kind).astype(np.float64).T + bias.double().numpy())
    found = streaming_gguf_linear(x, tiles(blocks, kind), kind, 2 * 80, bias, gated=True).double().numpy()
    assert np.linalg.norm(found - truth) < TOLERANCE[torch.bfloat16] * np.linalg.norm(truth)


@pytest.mark.parametrize("kind", FEW)
def test_bitwise_the_same_for_any_thread_count_and_batch(level: str, kind: str) -> None:
    """A row's result depends neither on the threads nor on the other rows, but for the side of MANY with AMX."""
    packed = tiles(_blocks(kind, 992, 768), kind)
    x = torch.randn(MANY - 1, 768).bfloat16()
    before = torch.get_num_threads()
    for gate in (False, True):
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(streaming_gguf_linear(x, packed, kind, 992, gated=gate))
        torch.set_num_threads(before)
        assert all(torch.equal(r, results[0]) for r in results)
        for count in (1, 2, 7, 13):
            assert torch.equal(streaming_gguf_linear(x[:count], packed, kind, 992, gated=gate), results[0][:count])


@pytest.mark.parametrize("kind", FEW)
def test_extremes(level: str, kind: str) -> None:
    """All codes and scales at their limits and of one sign: nothing saturates or overflows."""
    form = TILED[kind]
    x = torch.ones(3, 4864)
    x[1] = -1
    x[2, ::2] = -1
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks, at = torch.full((16, 4864 // form.entries, form.nbytes), byte, dtype=torch.uint8), 0
        for field in form.fields:
            if field.unit == 2:  # 1.0
                blocks[..., at : at + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)
            at += field.nbytes
        weight = torch.from_numpy(_numbers(blocks.flatten(1), kind)).double()
        found = streaming_gguf_linear(x, tiles(blocks.flatten(1), kind), kind, 16)
        torch.testing.assert_close(found.double(), x.double() @ weight.T, rtol=2e-6, atol=0.1)


@pytest.mark.parametrize("kind", FEW)
def test_what_is_not_finite(level: str, kind: str) -> None:
    packed = tiles(_blocks(kind, 16, 256), kind)
    x = torch.zeros(4, 256)
    x[1, 100] = torch.nan
    x[2, 5] = torch.inf
    found = streaming_gguf_linear(x, packed, kind, 16)
    assert torch.equal(found[0], torch.zeros(16))
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


@pytest.mark.parametrize("kind", FEW)
def test_rows_are_exact(level: str, threads: int, kind: str) -> None:
    """Every row of a table, in any order; bit by bit in float32."""
    blocks = _blocks(kind, 100, 768)
    wanted, packed = torch.from_numpy(_numbers(blocks, kind)), tiles(blocks, kind)
    ids = torch.randperm(100, dtype=torch.int32)
    assert torch.equal(decoding_gguf_embedding(ids, packed, kind, "float32"), wanted[ids.long()])
    assert torch.equal(decoding_gguf_embedding(ids.long(), packed, kind, "bfloat16"), wanted[ids.long()].bfloat16())
    assert decoding_gguf_embedding(ids[:0], packed, kind, "float16").shape == (0, 768)


@pytest.mark.parametrize("kind", FEW)
def test_tiles_are_made_as_specified(library: Path, kind: str) -> None:
    """Whole and broken tiles of rows; they hold the bytes of the file and nothing else."""
    libraries = Libraries([library])
    assert libraries.find(f"graphllm_gguf_tiles_{kind}") is not None
    for rows, inner in ((1, 256), (16, 512), (53, 768)):
        blocks = _blocks(kind, rows, inner)
        made = fast_tiles(blocks, kind, libraries)
        assert torch.equal(made, tiles(blocks, kind))
        assert torch.equal(untiled(made, kind)[:rows], blocks)
        assert made.shape[0] * 16 * blocks.shape[1] == made.numel()


@pytest.mark.parametrize("kind", FEW)
def test_tiles_loaded_without_torch_are_those_of_the_loader(library: Path, kind: str, tmp_path: Path) -> None:
    """Of one matrix, of several below each other, of rows in heads, and in more than one piece; and plain numbers as
    well."""
    rows = {"table": 3000, "q": 64, "k": 32, "v": 19}
    blocks = {name: _blocks(kind, n, 768).numpy() for name, n in rows.items()}
    draw = np.random.default_rng(0)
    plain = {name: draw.standard_normal(768).astype(np.float32) for name in ("norm", "more")}
    tensors, data = {}, b""
    for name, array in {**blocks, **plain}.items():
        tag = "F32" if name in plain else "U8"
        tensors[name] = TensorInfo(tmp_path / "file", tag, array.shape, len(data), array.nbytes)
        data += array.tobytes()
    (tmp_path / "file").write_bytes(data)
    width = tensors["q"].shape[1]

    def stored(name: str, head: str = "") -> Decode:
        read = Read((name,), (rows[name], width), "uint8")
        return Decode(f"gguf_{kind}{head}", (read,), (rows[name], 768))

    def tiled(name: str, matrix: Expr, count: int) -> Entry:
        encoding = f"tiled_{kind}"
        shape = encoding_of(encoding).parts[0].shape(count, 768)
        return Entry(name, shape, "uint8", Encode(encoding, "tiles", matrix))

    qkv = Concat((stored("q", "-32"), stored("k", "-16"), stored("v")))
    plan = WeightPlan((
        tiled("embed.tiles", stored("table"), 3000), tiled("qkv", qkv, 115),
        Entry("norm", (768,), "bfloat16", Read(("norm",), (768,))),
        Entry("less", (768,), "bfloat16", Each("-1", Read(("more",), (768,)))),
        Entry("values", (1, 3), "float32", Values((0.1, 2.0, 1e-9), (1, 3))),
        Entry("head", encoding_of(f"tiled_{kind}").parts[0].shape(3000, 768), "uint8", Tie("embed.tiles")),
    ))  # fmt: skip
    checkpoint = Checkpoint(tmp_path, tensors)
    libraries = Libraries([library])
    wanted = load_weights(plan, checkpoint, libraries=libraries)
    loader = host_loader(plan, checkpoint, libraries)
    assert loader is not None
    found = loader.load()
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        want = wanted[name]
        bits = want.view(torch.uint16) if want.dtype == torch.bfloat16 else want
        assert array.shape == want.shape
        assert np.array_equal(array.numbers, bits.numpy()), name
    assert found["head"] is found["embed.tiles"]
    more = Checkpoint(tmp_path, {**tensors, "strange": tensors["norm"]})
    assert host_loader(plan, more, libraries) is None  # the general loader says what is wrong
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(len(data) - 1)
    with pytest.raises(WeightError, match="ends too early"):
        loader.load()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
def test_all_types(compiled_for: CompiledFor, name: str) -> None:
    """With all optimizations."""
    with compiled_for(_kernels(tuple(TILED)), LEVELS[name]):
        for kind in TILED:
            for rows in (1, 8, 12, 40):
                _check_products(kind, rows, AMX and name == "native")


@pytest.mark.parametrize("kind", TILED)
def test_layout(kind: str) -> None:
    """Tiles have the bytes of their blocks and stand for their numbers."""
    blocks = _blocks(kind, 21, 512)
    made = tiles(blocks, kind)
    assert torch.equal(untiled(made, kind)[:21], blocks)
    assert not untiled(made, kind)[21:].any()
