"""gated_delta beside transformers, and its C++ kernel at every instruction level: against the reference, and row by row
in deterministic mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from graphllm.ops.recurrent.gated_delta import cpu, gated_delta
from graphllm.ops.recurrent.gated_delta.cpu import cpu_gated_delta
from tests.ops.levels import LEVELS, PARAMS
from tests.ops.packed import packed

DTYPES = {torch.float32: 3e-6, torch.bfloat16: 4e-3}


@pytest.fixture(scope="module", params=PARAMS)
def level(request: pytest.FixtureRequest, compiled_for: Callable[..., Any]) -> Iterator[str]:
    with compiled_for([*cpu._kernels.values()], LEVELS[request.param]):
        yield request.param


def _drawn(
    T: int, G: int, H: int, K: int, V: int, dtype: torch.dtype = torch.float32, channels: bool = False
) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(T + K)
    q, k, v = (torch.randn(T, n, m, generator=draw).to(dtype) for n, m in ((G, K), (G, K), (H, V)))
    g = -torch.rand(T, H, K, generator=draw) if channels else -torch.rand(T, H, generator=draw)
    return q, k, v, g, torch.rand(T, H, generator=draw)


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("T", [1, 5, 64, 150])
def test_reference_is_what_transformers_computes(T: int) -> None:
    """In chunks of 64 there; from a state that is not zero."""
    G, H, K, V = 2, 6, 24, 20
    q, k, v, g, beta = _drawn(T, G, H, K, V)
    state = torch.randn(3, 1, H, V, K, generator=torch.Generator().manual_seed(0))
    expected, last = torch_chunk_gated_delta_rule(
        *(t[None] for t in (q, k, v, g, beta)), initial_state=state[1].transpose(-1, -2).clone(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out = gated_delta(q, k, v, g, beta, state, packed([T], [1]), scale=K**-0.5, norm_eps=1e-6)
    torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(state[1, 0].transpose(-1, -2), last[0], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("sizes", "counts", "versions"),
    [((1, 2, 128, 72), (1, 2, 11), 1), ((2, 2, 33, 7), (5, 1, 3), 3), ((1, 4, 256, 33), (1, 4), 4)],
)
def test_any_size(
    level: str, threads: int, sizes: tuple[int, ...], counts: tuple[int, ...], versions: int, channels: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    _, H, K, V = sizes
    S, given = len(counts), _drawn(sum(counts), *sizes, dtype=dtype, channels=channels)
    at = packed(counts, [*range(S, 0, -1)], [(2 * s + 1) % versions for s in range(S)])
    state = torch.randn(S + 2, versions, H, V, K)
    wide, found = state.double(), state.clone()
    truth = gated_delta(*(t.double() for t in given), wide, at, scale=K**-0.5, norm_eps=1e-6)
    out = cpu_gated_delta(*given, found, at, K**-0.5, 1e-6)
    assert _error(out, truth) < DTYPES[dtype]
    assert _error(found, wide) < 3e-6
    untouched = (wide == state).all(-1)
    assert torch.equal(found[untouched], state[untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [False, True])
def test_rows_are_what_they_are_alone(level: str, threads: int, channels: bool, dtype: torch.dtype) -> None:
    """In deterministic mode: prompts whole, and in random chunks and single tokens in one batch; states too."""
    lengths, (G, H, K, V) = (70, 41, 9), (1, 2, 40, 36)
    given = [_drawn(n, G, H, K, V, dtype, channels) for n in lengths]
    draw = torch.Generator().manual_seed(3)

    def run(steps: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[Tensor], Tensor]:
        state, done = torch.zeros(4, 1, H, V, K), [0] * 3
        outs: list[list[Tensor]] = [[], [], []]
        for step in steps:
            rows = [[t[done[s] : done[s] + n] for t in given[s]] for s, n in step]
            at = packed([n for _, n in step], [s for s, _ in step])
            merged = [torch.cat(parts) for parts in zip(*rows, strict=True)]
            out = cpu_gated_delta(*merged, state, at, K**-0.5, 1e-6, invariant=True)
            for (s, n), some in zip(step, out.split([n for _, n in step]), strict=True):
                outs[s].append(some)
                done[s] += n
        return [torch.cat(rows) for rows in outs], state

    whole, last = run([[(s, n)] for s, n in enumerate(lengths)])
    left, steps = list(lengths), []
    while any(left):
        sizes = [min(n, int(torch.randint(1, (2, 5, 30)[len(steps) % 3], (), generator=draw))) for n in left]
        steps.append([(s, n) for s, n in enumerate(sizes) if n])
        left = [n - taken for n, taken in zip(left, sizes, strict=True)]
    some, kept = run(steps)
    assert all(torch.equal(a, b) for a, b in zip(some, whole, strict=True))
    assert torch.equal(kept, last)
