"""DeepSeek-V3.2 and GLM-5: what a token takes of the cache, and that the few tokens that it sees are not all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphllm.config import ConfigError
from graphllm.ir.registry import load_models
from graphllm.program.artifact import Artifact
from graphllm.program.states import plan_blocks
from tests.models import driver
from tests.models import test_parity as parity
from tests.tiers import thorough

ARCHS = {arch.name: arch for arch in parity.ARCHS}
V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "moe_intermediate_size": 2048, "vocab_size": 129280,
    "first_k_dense_replace": 3,
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "latent"), [("bfloat16", 1152), ("float8_e4m3fn", 512 + 16 + 128)])
def test_bytes_of_a_token(dtype: str, latent: int) -> None:
    """In every layer a latent with its rotated part, and a key of the indexer in the model's dtype."""
    model = load_models()["DeepseekV32ForCausalLM"]
    c, graph = model.config(V32), model.graphs[0]
    layers = [
        [s.typed({"cache": dtype, "model": "bfloat16"}) for s in graph.states(c, t)] for t in graph.layer_types(c)
    ]
    plan = plan_blocks(layers, 64, 163_840)
    assert [g.block_size for g in plan.groups] == [64]
    assert plan.unused == (0,)
    assert plan.bytes_per_block == 61 * 64 * (latent + 2 * 128)


@torch.no_grad()
def test_inspect_shows_them(tmp_path: Path) -> None:
    arch = ARCHS["deepseek_v32"]
    parity.saved_oracle(arch, tmp_path)
    runner = driver.Driver(tmp_path, "eager")
    sizes = arch.config
    each = sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"] + sizes["index_head_dim"]
    assert Artifact.open(runner.place).manifest.memory.token == sizes["num_hidden_layers"] * each * 4


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v32", thorough("glm_moe_dsa_shared")])
def test_beyond_index_topk_other_tokens_count(name: str, tmp_path: Path) -> None:
    """A prompt of index_topk tokens is as dense attention has it; a longer one is not."""
    arch = ARCHS[name]
    parity.saved_oracle(arch, tmp_path)
    dense = parity._build(arch, arch.config | {"index_topk": 512})
    runner = driver.Driver(tmp_path, "eager")
    prompt = torch.randint(parity.V, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    for length, alike in ((8, True), (200, False)):
        (logits,), _ = runner.generate([prompt[:length]], 1)
        other = dense(torch.tensor([prompt[:length]]), use_cache=False).logits[0, -1]
        assert bool((logits - other).abs().max() < 1e-4) is alike


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": None}, ("q_lora_rank is null", "indexer")),
        ({"index_head_dim": 32}, ("index_head_dim is 32", "64")),
        ({"index_topk": 0}, ("index_topk", "0")),
        ({"indexer_rope_interleave": True}, ("indexer_rope_interleave", "True")),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "indexer_rope_interleave": False}, ("indexer_rope_interleave",)),
        (
            {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 3, "index_topk_pattern": "SFF"},
            ("first layer has no indexer",),
        ),
        (
            {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 3, "index_topk_pattern": "FFX"},
            ("'X'", "full and shared"),
        ),
        (
            {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 3, "indexer_types": ["full"]},
            ("1 entries", "num_hidden_layers = 3"),
        ),
    ],
)
def test_files_that_are_refused(changes: dict[str, object], words: tuple[str, ...]) -> None:
    hf = V32 | changes
    with pytest.raises(ConfigError) as error:
        load_models()[hf["architectures"][0]].config(hf)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 3}, "FFSSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFS"),
        ({"index_topk_pattern": "FSSFSF"}, "FSSFSF"),
        ({"indexer_types": ["full", "shared"] * 3}, "FSFSFS"),
    ],
)
def test_which_layers_have_an_indexer(given: dict[str, object], expected: str) -> None:
    """As transformers reads them."""
    import transformers

    fields = {"num_hidden_layers": 6, **given}
    c = load_models()["GlmMoeDsaForCausalLM"].config(V32 | {"architectures": ["GlmMoeDsaForCausalLM"]} | fields)
    found = "".join("F" if t.startswith("indexed") else "S" for t in c.layer_types)
    theirs = transformers.GlmMoeDsaConfig(**fields).indexer_types
    assert found == expected == "".join({"full": "F", "shared": "S"}[t] for t in theirs)
