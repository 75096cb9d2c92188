"""A plan divided among ranks: the shares put together are the whole, each segment and expert by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphllm.config import ConfigError
from graphllm.ir.weight import Weight
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.encodings import encoding_of
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.expr import Encode, Permute, Read
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.shard import shard_plan
from tests.weights.fakes import plan_of

EXPERTS = tuple(f"e{i}.{p}" for i in range(4) for p in ("gate", "up"))
WEIGHTS = {
    "qkv": Weight((24, 6), ("q", "k", "v"), (12, 8, 4), shard="output"),
    "merged": Weight((24, 6), ("merged",), (12, 8, 4), shard="output"),
    "turned": Weight((24, 6), ("turned",), (12, 8, 4), transpose=True, shard="output"),
    "bias": Weight((24,), ("bias",), (12, 8, 4), shard="output"),
    "o": Weight((6, 24), ("o",), shard="input"),
    "both": Weight((4, 16, 6), EXPERTS, (8,) * 8, shard="output", expert_axis=0),
    "experts": Weight((4, 16, 6), EXPERTS, (8,) * 8, shard="expert", expert_axis=0),
    "stacked": Weight((4, 6, 8), expr=Permute(Read(("stacked",), (4, 8, 6)), (0, 2, 1)), shard="input"),
    "norm": Weight((6,), ("norm",)),
    "tokens": Weight((10, 6), ("tokens",), shard="vocab"),
}
SHAPES = {
    "q": (12, 6), "k": (8, 6), "v": (4, 6), "merged": (24, 6), "turned": (6, 24), "bias": (24,), "o": (6, 24),
    **dict.fromkeys(EXPERTS, (8, 6)), "stacked": (4, 8, 6), "norm": (6,), "tokens": (10, 6),
}  # fmt: skip


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_shares_make_the_whole(tmp_path: Path, degree: int) -> None:
    save_file({n: torch.randn(s) for n, s in SHAPES.items()}, tmp_path / "model.safetensors")
    checkpoint, plan = Checkpoint.open(tmp_path), plan_of(WEIGHTS)
    whole = load_weights(plan, checkpoint)
    shared = WeightPlan.from_json(shard_plan(plan, degree).to_json())  # one plan for all ranks
    ranks: Any = [load_weights(shared, checkpoint, rank=r) for r in range(degree)]
    assert all(tuple(t.shape) == shared[n].shape for r in ranks for n, t in r.items())

    def joined(name: str, dim: int, segments: tuple[int, ...]) -> torch.Tensor:
        """Of every rank its share of each segment, one segment behind the other."""
        shares = [r[f"embed.{name}"].split([n // degree for n in segments], dim) for r in ranks]
        return torch.cat([part for parts in zip(*shares, strict=True) for part in parts], dim)

    for name in ("qkv", "merged", "turned", "bias"):
        assert torch.equal(joined(name, 0, (12, 8, 4)), whole[f"embed.{name}"]), name
        assert shared[f"embed.{name}"].segments == tuple(n // degree for n in (12, 8, 4))
    for name, dim, segments in (("o", 1, (24,)), ("both", 1, (8, 8)), ("experts", 0, (4,)), ("stacked", 2, (8,))):
        assert torch.equal(joined(name, dim, segments), whole[f"embed.{name}"]), name
    tokens = torch.cat([r["embed.tokens"] for r in ranks])  # behind the last one zeros
    assert torch.equal(tokens[:10], whole["embed.tokens"])
    assert not tokens[10:].any()
    for r in ranks:
        assert torch.equal(r["embed.norm"], whole["embed.norm"])


def test_encoded_after_it_was_divided(tmp_path: Path) -> None:
    """Quantized shares are what quantizing the share gives."""
    save_file({"o": torch.randn(32, 256)}, tmp_path / "model.safetensors")
    divided = shard_plan(plan_of({"o": Weight((32, 256), ("o",), shard="input")}), 2)["embed.o"]
    parts = [
        Entry(p, Encode("int8", p, divided.expr).shape, dtype, Encode("int8", p, divided.expr))
        for p, dtype in (("values", "int8"), ("scales", "bfloat16"))
    ]
    plain = WeightPlan((divided,))
    for rank in range(2):
        found = load_weights(WeightPlan(tuple(parts)), Checkpoint.open(tmp_path), rank=rank)
        share = load_weights(plain, Checkpoint.open(tmp_path), rank=rank)["embed.o"]
        expected = encoding_of("int8").encoded(share)
        assert torch.equal(found["values"], expected["values"])
        assert torch.equal(found["scales"], expected["scales"])


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3: embed.qkv has 8 entries to divide"):
        shard_plan(plan_of(WEIGHTS), 3)
    tied = {"a": Weight((4, 4), ("a",), shard="output"), "b": Weight((4, 4), tie="embed.a", shard="output")}
    with pytest.raises(ValueError, match=r"embed.b: tied"):
        shard_plan(plan_of(tied), 2)
    with pytest.raises(ValueError, match="needs expert_axis"):
        shard_plan(plan_of({"a": Weight((4, 4), ("a",), shard="expert")}), 2)
