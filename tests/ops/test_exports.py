"""Recurrent states at the last border inside of a step, beside a prompt that ends there, in float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.config import Bucket, Target
from graphllm.ir.op import CallSite, Impl, Op, all_ops
from graphllm.ir.registry import load_ops
from tests.tiers import draws

COUNTS, EXPORTS = (1, 130, 5, 64, 200, 70, 128, 0), (-1, 9, 10, 11, -1, 12, 13, -1)
SLOTS = (3, 0, 7, 5, 2, 6, 1, 14)
BORDERS = {1: 128, 5: 64, 6: 64}  # by sequence, where it has an export that is written
ENTRIES, T = 15, sum(COUNTS) + 3
load_ops()
NAMES = ("causal_conv", "gated_delta", "selective_scan", "ssd_scan")
TARGET = Target("cuda", ("sm_90", "sms_132"), "H200")


def inputs(name: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Of a step with these sequences. Heads are as large as the kernels of chunks take."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw).to(kind).to(device)

    starts = [sum(COUNTS[:i]) for i in range(len(COUNTS) + 1)]
    at = {"query_start_loc": starts, "slots": SLOTS, "state_versions": (0,) * len(SLOTS)}
    wide = torch.float32
    if name == "causal_conv":
        own = {"x_TD": normal(T, 72), "weight_DW": normal(72, 4), "state": normal(ENTRIES, 1, 3, 72)}
        own |= {"bias_D": None, "activation": "silu"}
    elif name == "gated_delta":
        own = {"q_TGK": normal(T, 2, 128), "k_TGK": normal(T, 2, 128), "v_THV": normal(T, 4, 128)}
        own |= {"g": -normal(T, 4, kind=wide).abs() / 20, "beta_TH": normal(T, 4, kind=wide).sigmoid()}
        own |= {"state": normal(ENTRIES, 1, 4, 128, 128, kind=wide), "scale": 128**-0.5, "norm_eps": 1e-6}
    elif name == "ssd_scan":
        own = {"x_THP": normal(T, 4, 64), "dt_TH": normal(T, 4), "A_H": -normal(4, kind=wide).abs() / 20}
        own |= {"B_TGN": normal(T, 2, 64), "C_TGN": normal(T, 2, 64), "D_H": None, "dt_bias_H": None}
        own |= {"state": normal(ENTRIES, 1, 4, 64, 64, kind=wide), "dt_min": 0.0, "dt_max": 0.0}
    else:
        own = {"x_TD": normal(T, 24), "dt_TD": normal(T, 24), "A_DN": -normal(24, 16, kind=wide).abs()}
        own |= {"B_TN": normal(T, 16), "C_TN": normal(T, 16), "D_D": None, "dt_bias_D": None}
        own |= {"state": normal(ENTRIES, 1, 24, 16, kind=wide)}
    places = {n: torch.tensor(v, dtype=torch.int32, device=device) for n, v in at.items()}
    return own | places | {"exports": torch.tensor(EXPORTS, dtype=torch.int32, device=device)}


def states_at_borders(op: Op, given: dict[str, Any]) -> dict[int, Tensor]:
    """By sequence with an export, its state where it would end there, in float64."""
    exact = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()}
    found = {}
    for sequence, border in BORDERS.items():
        first = int(given["query_start_loc"][sequence])
        places = {"query_start_loc": [first, first + border], "slots": [SLOTS[sequence]], "state_versions": [0]}
        state = exact["state"].clone()
        now = {n: torch.tensor(v, dtype=torch.int32, device=state.device) for n, v in places.items()}
        op.reference(**(exact | now | {"state": state, "exports": None}))
        found[sequence] = state[SLOTS[sequence], 0]
    return found


def check(op: Op, run: Callable[..., Tensor], given: dict[str, Any], tolerance: float) -> float:
    """Exports are right, nothing else differs from a step without them; the largest error."""
    before, plain, state = (given["state"].clone() for _ in range(3))
    wanted = run(**(given | {"state": plain, "exports": None}))
    out = run(**(given | {"state": state}))
    owned = sum(COUNTS)
    assert torch.equal(out[:owned], wanted[:owned])
    exported = {EXPORTS[sequence] for sequence in BORDERS}
    others = [entry for entry in range(ENTRIES - 1) if entry not in exported]
    assert torch.equal(state[others], plain[others])
    assert torch.equal(plain[sorted(exported)], before[sorted(exported)])
    worst = 0.0
    for sequence, truth in states_at_borders(op, given).items():
        error = (state[EXPORTS[sequence], 0].double() - truth).norm() / truth.norm()
        worst = max(worst, float(error))
    assert worst <= tolerance, worst
    return worst


def exporting(name: str) -> Iterator[Impl]:
    """The implementations of an op that export."""
    yield from (impl for impl in all_ops()[name].impls.values() if getattr(impl.fn, "exporting", False))


@pytest.mark.parametrize("name", NAMES)
def test_the_specification(name: str) -> None:
    op = all_ops()[name]
    check(op, op.reference, inputs(name, torch.float32), 1e-5)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is chosen at import")
@pytest.mark.parametrize(
    ("name", "impl"),
    [("causal_conv", "triton"), ("gated_delta", "triton_chunks"), ("ssd_scan", "triton_tiles")],
)
def test_an_implementation(name: str, impl: str) -> None:
    op = all_ops()[name]
    found, bucket = op.impls[impl], Bucket("mixed", T, T)
    dtypes = (inputs(name, dtype) for dtype in (torch.bfloat16, torch.float32))
    given = next(given for given in dtypes if found.supports(CallSite(given, TARGET, bucket)))
    site = CallSite(given, TARGET, bucket)
    for config in found.configs(site)[: draws(1, 2)]:
        check(op, lambda config=config, **args: found.fn(**args, **config), given, 1e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_implementation_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    op, given = all_ops()[name], inputs(name, dtype)
    found, target = op.impls["cpu"], Target("cpu", ("avx2",), "any")
    for deterministic in (False, True):
        site = CallSite(given, target, Bucket("mixed", 2, 1024), deterministic=deterministic)
        assert found.supports(site)
        for config in found.configs(site):
            check(op, lambda config=config, **args: found.fn(**args, **config), given, 1e-5)
