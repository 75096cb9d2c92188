"""gated_delta in chunks, as Triton's interpreter runs it, against the recurrence in float64: steps of any lengths,
gates of heads and of channels and keys at their extremes, and what other sequences hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from graphllm.config import Bucket, Target
from graphllm.ir import CallSite
from graphllm.ops.recurrent.gated_delta import gated_delta
from graphllm.ops.recurrent.slots import Slots
from tests.ops.packed import packed
from tests.tiers import thorough

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's kernels")
G, H, K, V = 1, 2, 16, 24
TARGET = Target("cuda", ("sm_90", "sms_132"))


def _drawn(
    T: int, gate: float | None = None, beta: float | None = None, same: bool = False, channels: bool = False
) -> tuple[Tensor, ...]:
    """channels: gates of each, in some down to -20 a token."""
    draw = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(T, n, m, generator=draw).bfloat16() for n, m in ((G, K), (G, K), (H, V)))
    if same:
        k[:] = k[:1].clone()
    g = -torch.rand(T, H, generator=draw) if gate is None else torch.full((T, H), gate)
    if channels:
        g = g[..., None] * (20 * torch.rand(T, H, K, generator=draw) ** 4 if gate is None else torch.ones(K))
    return q, k, v, g, torch.rand(T, H, generator=draw) if beta is None else torch.full((T, H), beta)


def _in_chunks(given: Sequence[Tensor], state: Tensor, at: Slots, norm_eps: float = 1e-6) -> Tensor:
    args = gated_delta.bind((*given, state, at), {"scale": K**-0.5, "norm_eps": norm_eps})
    impl = gated_delta.impls["triton_channels" if args["g"].dim() == 3 else "triton_chunks"]
    return impl.at(CallSite(args, TARGET, Bucket("mixed", 2, 512)))(**args)


def _check(given: Sequence[Tensor], state: Tensor, at: Slots, norm_eps: float = 1e-6, of_state: float = 3e-6) -> None:
    """Results, and all states, with those that are not to be written."""
    wide, found, end = state.double(), state.clone(), int(at.query_start_loc[-1])
    truth = gated_delta(*(t.double() for t in given), wide, at, scale=K**-0.5, norm_eps=norm_eps)
    out = _in_chunks(given, found, at, norm_eps)
    for a, b, most in ((out[:end], truth[:end], 4e-3), (found, wide, of_state)):
        assert float((a.double() - b).norm() / b.norm()) < most
    untouched = (wide == state).all(-1)
    assert torch.equal(found[untouched], state[untouched])


@pytest.mark.parametrize("channels", [False, True])
def test_who_serves_a_step_with_prompts(channels: bool) -> None:
    """Chunks serve sizes that ran on a GPU, and no deterministic step; each step is served by one kernel."""
    for K, V, deterministic, expected in ((128, 128, False, True), (128, 128, True, False), (24, 40, False, False)):
        rows = [torch.zeros(64, heads, n, dtype=torch.bfloat16) for heads, n in ((1, K), (1, K), (2, V))]
        state, at = torch.zeros(2, 1, 2, V, K), packed((64,), [0], [0])
        g = torch.zeros(64, 2, K) if channels else torch.zeros(64, 2)
        args = gated_delta.bind((*rows, g, torch.zeros(64, 2), state, at), {"scale": 1.0})
        site = CallSite(args, TARGET, Bucket("mixed", 2, 512), deterministic=deterministic)
        serve = [name for name, impl in gated_delta.impls.items() if impl.device == "cuda" and impl.supports(site)]
        assert serve == [("triton_channels" if channels else "triton_chunks") if expected else "triton"]


@pytest.mark.parametrize(
    ("counts", "versions"),
    [((64,), 1), ((31, 32), 1), ((1, 130, 0, 33, 5, 64), 1), ((2, 40, 3, 129), 3), ((40, 41), 40), ((1, 2, 0), 1)],
)
@pytest.mark.parametrize(("norm_eps", "channels"), [(0.0, False), (1e-6, False), (1e-6, True), thorough(0.0, True)])
def test_any_lengths(counts: tuple[int, ...], versions: int, norm_eps: float, channels: bool) -> None:
    S = len(counts)
    q, k, *rest = _drawn(sum(counts) + 3, channels=channels)
    if norm_eps == 0:
        k = (k * (0.7 * K**-0.5)).bfloat16()
    at = packed(counts, [*range(S, 0, -1)], [(2 * s + 1) % versions for s in range(S)])
    _check((q, k, *rest), torch.randn(S + 2, versions, H, V, K), at, norm_eps)


@pytest.mark.parametrize(("gate", "beta"), [(0.0, 1.0), (-50.0, 0.5), (-3e4, 0.5), (0.0, 2.0), (-0.01, 1.9)])
@pytest.mark.parametrize(("same", "channels"), [(False, False), (True, False), (True, True), thorough(False, True)])
def test_extremes(gate: float, beta: float, same: bool, channels: bool) -> None:
    """Also of keys that are all equal, of which powers of a chunk's matrix would have numbers beyond float32's."""
    _check(_drawn(100, gate, beta, same, channels), torch.randn(2, 1, H, V, K), packed([100]), of_state=2e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_other_sequences_may_hold_anything(channels: bool) -> None:
    counts = (40, 70, 3)
    given, at = _drawn(sum(counts) + 20, channels=channels), packed(counts)
    spoilt = [t.clone() for t in given]
    for t in spoilt:
        t[40:] = float("nan")
    state = torch.randn(4, 1, H, V, K)
    kept, other = state.clone(), state.clone()
    out, same = _in_chunks(given, kept, at), _in_chunks(spoilt, other, at)
    assert torch.equal(out[:40], same[:40])
    assert torch.equal(kept[0], other[0])
    assert torch.equal(other[3], state[3])
