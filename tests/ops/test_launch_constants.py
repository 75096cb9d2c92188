"""Which launch constants of linear layers on a GPU are tried: few, and those that were measured to be the fastest."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bench.record import read
from graphllm.compile.pieces import trace_reference
from graphllm.config import Bucket, ConfigError, Target
from graphllm.ir import CallSite
from graphllm.ir.registry import load_ops

OPS = load_ops()
TARGET = Target("cuda", ("sm_90", "sms_132"))
MEASURED = read("h100", "study_tuning")
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's kernels")


def _site(op: str, rows: int, weights: int, inner: int, form: str = "") -> CallSite:
    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    given: dict[str, Any] = {"x_TI": made(rows, inner), "weight_OI": made(weights, inner), "form": form}
    if form == "int4":
        codes, constants = torch.empty(weights, inner // 4, dtype=torch.int16), torch.empty(inner // 128, weights)
        given |= {"weight_OI": codes, "scales_GO": constants.half(), "zeros_GO": constants.short(), "group": 128}
    if op == "linear_add_norm":
        given |= {"residual_TO": made(rows, weights), "norm_O": made(weights), "eps": 1e-5}
    bucket = Bucket("decode", rows, rows) if rows == 1 else Bucket("decode", 2, rows)
    return CallSite(OPS[op].bind((), given), TARGET, bucket)


def _candidates(op: str, rows: int, weights: int, inner: int) -> list[tuple[str, dict[str, Any]]]:
    site = _site(op, rows, weights, inner)
    return [
        (impl.name, dict(config))
        for impl in OPS[op].impls.values()
        if impl.device == "cuda" and impl.supports(site)
        for config in impl.configs(site)
    ]


def test_what_was_the_fastest_is_tried() -> None:
    """At each of the sites of two models where all candidates were timed; a third of them is tried now."""
    tried = timed = 0
    for name, row in MEASURED.items():
        found = _candidates(row["op"], row["rows"], row["weights"], row["inner"])
        constants = json.loads(row["constants"])
        same = [c for impl, c in found if impl == row["implementation"] and constants.items() <= c.items()]
        assert len(same) == 1, name
        tried, timed = tried + len(found), timed + row["candidates timed"]
    assert timed > 1200
    assert tried < timed / 3


@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64, 100, 256])
@pytest.mark.parametrize("weights", [64, 1000, 4096, 28672, 151936])
@pytest.mark.parametrize("inner", [64, 1024, 14336])
def test_something_is_tried_everywhere(rows: int, weights: int, inner: int) -> None:
    """Some tile for all rows; parts of sums only where all programs run at once and something is left for each."""
    for op in ("fused_linear", "linear_add_norm"):
        tiles = [c for impl, c in _candidates(op, rows, weights, inner) if impl == "triton_tile"]
        assert tiles
        assert len({str(sorted(c.items())) for c in tiles}) == len(tiles)
        for c in tiles:
            assert c["block_t"] * c["token_tiles"] >= rows
            programs = -(-weights // c["block_n"]) * c["token_tiles"] * c["splits"]
            assert c["splits"] == 1 or programs <= TARGET.multiprocessors
            assert c["splits"] <= -(-inner // c["block_k"])


@pytest.mark.parametrize("rows", [9, 16, 33, 64])
@pytest.mark.parametrize(("weights", "inner"), [(28672, 4096), (4096, 14336), (48, 256), (6144, 4096), (1008, 1792)])
def test_tiles_of_int4_fit(rows: int, weights: int, inner: int) -> None:
    """At least two stages fit into shared memory with what a tile's output takes, programs have a tile each, and parts
    of sums are whole spans."""
    from graphllm.ops.gemm.fused_linear.gluon_int4_tile import int4_tile_configs

    tiles = int4_tile_configs(_site("linear_add_norm", rows, weights, inner, "int4"), splits=True)
    assert tiles
    for c in tiles:
        boxes = c["groups"] * c["boxes"]
        stage = boxes * 64 * (128 + 2 * 2 * 2) + 256 * c["block_t"] * 2  # codes, scales and zero points, and x
        assert c["block_t"] >= rows
        assert 2 <= c["stages"] <= (227 * 1024 - c["groups"] * 64 * c["block_t"] * 2) // stage
        assert c["programs"] <= -(-weights // (64 * boxes)) * c["splits"]
        assert inner // 256 % c["splits"] == 0


@pytest.mark.parametrize(
    ("dtype", "inner", "said"),
    [
        (torch.float32, 20, "experts of 32 x 20: kernels for a GPU take multiples of 8; use the backend eager"),
        (torch.float64, 24, r"dtype torch.float64: .* use bfloat16, float16 or float32"),
    ],
)
def test_experts_that_no_kernel_takes(dtype: torch.dtype, inner: int, said: str) -> None:
    """Compiling names the sizes and what helps."""
    given = {
        "x_TD": torch.empty(4, 32, dtype=dtype), "gate_up_N2FD": torch.empty(6, 2 * inner, 32, dtype=dtype),
        "down_NDF": torch.empty(6, 32, inner, dtype=dtype), "experts_TA": torch.empty(4, 2, dtype=torch.int32),
        "weights_TA": torch.empty(4, 2),
    }  # fmt: skip
    site = CallSite(OPS["fused_moe"].bind((), given), TARGET, Bucket("decode", 2, 4))
    assert not any(impl.supports(site) for impl in OPS["fused_moe"].impls.values() if impl.device == "cuda")
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in site.args.items()}
        with pytest.raises(ConfigError, match=said):
            trace_reference(OPS["fused_moe"], CallSite(fake, TARGET, Bucket("decode", 2, 4)))
