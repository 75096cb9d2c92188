"""latent_attention on a CPU, at every instruction level: sizes that end inside of everything; rows computed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphllm.ir.kernels import c_kernel
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of, check_impl, relative_error
from graphllm.ops.attention.latent_attention import LatentRows, PagedLatents, UpProjections, latent_attention
from graphllm.ops.attention.latent_attention.cpu import cpu_latent_attention
from graphllm.ops.attention.ragged_cases import Sequences, ragged_batch
from tests.ops.levels import level_of
from tests.tiers import thorough

CACHES = ("", "_e4m3", "_int8")
KERNELS = [c_kernel(f"graphllm_latent_attention_{t}{cache}") for t in ("f32", "bf16") for cache in CACHES]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
Heads = tuple[int, int, int, int, int]  # H, N, R, L, V
WHOLE, ODD = (4, 32, 32, 64, 48), (3, 24, 6, 36, 20)

level = level_of(KERNELS)


def batch(sequences: Sequences, heads: Heads, page: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments, with a cache that is NaN where nobody has written, and matrices that are parts of one weight."""
    H, N, R, L, V = heads
    T = sum(n for n, _ in sequences)
    total, where = ragged_batch(Maker(torch.Generator(), torch.device("cpu"), dtype), sequences, page)
    cache = torch.full((total, page, L + R), torch.nan, dtype=dtype)
    for row, (n, length) in zip(where["block_table"].tolist(), sequences, strict=True):
        for position in range(length - n):
            cache[row[position // page], position % page] = torch.randn(L + R).to(dtype)
    shapes = {"q_nope_THN": (T, H, N), "q_rope_THR": (T, H, R), "latent_TL": (T, L), "k_rope_TR": (T, R)}
    weight = (torch.randn(H, N + V, L) * L**-0.5).to(dtype)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()} | where | {
        "k_up_HNL": weight[:, :N], "v_up_HVL": weight[:, N:], "latent_cache": cache, "scale": (N + R) ** -0.5,
    }  # fmt: skip


def check(args: dict[str, Any]) -> None:
    """Against the reference in float64, which writes the same into the cache."""
    dtype, exact = args["latent_TL"].dtype, {n: t.double() if is_float(t) else t for n, t in args.items()}
    found = latent_attention.impls["cpu"].fn(**latent_attention.bind((), args))
    assert relative_error(found, latent_attention(**exact)) < TOLERANCE[dtype]
    assert torch.equal(args["latent_cache"].nan_to_num(), exact["latent_cache"].to(dtype).nan_to_num())


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("threads", [1, thorough(2), 5], indirect=True)
def test_cases(level: str, threads: int) -> None:
    small = [case for case in cases_of(latent_attention) if case.size == "small"]
    results = check_impl(latent_attention, latent_attention.impls["cpu"], small)
    assert len(results) >= 3 * len(small)
    assert [str(r) for r in results if not r.ok] == []


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "heads", [WHOLE, (1, 16, 8, 32, 16), (20, 40, 16, 128, 33), (2, 70, 2, 100, 64), (9, 8, 64, 320, 8)], ids=str
)
@pytest.mark.parametrize("page", [1, 5, 16, 64])
def test_shapes(level: str, heads: Heads, page: int, dtype: torch.dtype) -> None:
    """In one step: single tokens, drafts, a chunk behind a context, and a prompt."""
    torch.manual_seed(0)
    check(batch([(1, 100), (4, 70), (37, 70), (0, 0), (66, 66), (1, 1)], heads, page, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "sequences", [[(1, 3)] * 40, [(600, 600)], [(300, 900), (1, 70)], [(2, 1000)], [(16, 16)] * 9], ids=str
)
@pytest.mark.parametrize("heads", [(1, 32, 16, 64, 32), ODD], ids=str)
def test_many_rows(level: str, threads: int, sequences: Sequences, heads: Heads, dtype: torch.dtype) -> None:
    """More rows than are few; prompts that are divided among threads, and heads that are."""
    torch.manual_seed(0)
    check(batch(sequences, heads, 16, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "page"), [(WHOLE, 16), (WHOLE, 8), (ODD, 16), ((20, 32, 16, 64, 32), 16)], ids=str)
def test_rows_are_what_they_are_alone(level: str, threads: int, dtype: torch.dtype, heads: Heads, page: int) -> None:
    """Prompts whole and by themselves, and in random chunks and single tokens in one batch."""
    torch.manual_seed(1)
    H, N, R, L, V = heads
    lengths, S = (70, 150, 33), 3
    rows = LatentRows(*(torch.randn(S, 150, *of).to(dtype) for of in ((H, N), (H, R), (L,), (R,))))
    up = UpProjections(*(torch.randn(H, of, L).to(dtype) * L**-0.5 for of in (N, V)))

    def run(steps: list[list[tuple[int, int]]]) -> torch.Tensor:
        blocks = -(-150 // page)
        cache, table = torch.zeros(S * blocks, page, L + R, dtype=dtype), torch.arange(S * blocks).int().view(S, blocks)
        out, done = torch.zeros(S, 150, H, V, dtype=dtype), [0] * S
        for step in steps:
            parts = LatentRows(*(torch.cat([t[s, done[s] : done[s] + n] for s, n in step]) for t in rows))
            starts = torch.tensor([0, *(n for _, n in step)]).cumsum(0).int()
            ends = torch.tensor([done[s] + n for s, n in step]).int()
            paged = PagedLatents(cache, table[[s for s, _ in step]], starts, ends)
            found = cpu_latent_attention(parts, up, paged, 0.2, invariant=True)
            for (s, n), some in zip(step, found.split([n for _, n in step]), strict=True):
                out[s, done[s] : done[s] + n] = some
                done[s] += n
        return out

    left, steps = list(lengths), list[list[tuple[int, int]]]()
    while any(left):
        sizes = [min(n, int(torch.randint(1, (2, 5, 40)[len(steps) % 3], ()))) for n in left]
        steps.append([(s, n) for s, n in enumerate(sizes) if n])
        left = [n - taken for n, taken in zip(left, sizes, strict=True)]
    assert torch.equal(run(steps), run([[(s, n)] for s, n in enumerate(lengths)]))
