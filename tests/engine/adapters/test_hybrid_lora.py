"""LoRA adapters on the linear layers of recurrent layers, and of attention over latents, beside PEFT's own model, on
tiny random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphllm.compile.families import find_model
from graphllm.ir.registry import load_ops
from graphllm.loading.checkpoint.source import open_source
from graphllm.weights.adapters.adapted import adapted_layer
from graphllm.weights.plan.plan import make_plan
from graphllm.weights.plan.shard import shard_plan
from tests.engine.adapters.test_moe_lora import Family, _open, _run, in_float8
from tests.models.test_parity import STEPS
from tests.tiers import thorough

DELTA: dict[str, Any] = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 8, "num_experts": 4,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
MIXER: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 8,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "first_k_dense_replace": 1, "moe_intermediate_size": 36, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "moe_intermediate_size": 36, "num_local_experts": 4, "linear_head_dim": 12, "linear_num_heads": 6,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention", "moe", "mlp"]
# transformers' name and fields, the modules that an adapter changes (PEFT refuses out_proj of some), and tensors
# of all experts.
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "qwen3_next": ("Qwen3Next", DELTA, ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"], []),
    "qwen3_5": ("Qwen3_5Text", DELTA, ["in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "gate_proj"], []),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "expand": 2, "chunk_size": 8},
        ["in_proj"],
        [],
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, ["in_proj", "out_proj", "w1", "k_proj"], []),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {**MIXER, "num_local_experts": 4, "shared_intermediate_size": 56, "layer_types": LAYERS[:2]},
        ["in_proj", "out_proj", "v_proj"],
        [],
    ),
    "zamba2": (
        "Zamba2",
        {"layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3, "adapter_rank": 5,
         "n_mamba_heads": 8, "mamba_d_state": 24, "chunk_size": 8, **STEPS},
        ["in_proj", "q_proj", "o_proj", "gate_up_proj", "linear"],
        [],
    ),
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": LAYERS, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
         "ssm_state_size": 24, "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 24,
         "moe_shared_expert_intermediate_size": 40, **STEPS},
        ["in_proj", "q_proj", "up_proj"],
        ["experts.up_proj", "experts.down_proj"],
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        LATENTS | {"q_lora_rank": None},
        ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
        ["experts.gate_up_proj"],
    ),
    "deepseek_v3": ("DeepseekV3", LATENTS, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], []),
    "kimi_linear": (
        "KimiLinear",
        KIMI,
        ["q_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj", "kv_a_proj_with_mqa", "up_proj"],
        ["experts.gate_up_proj", "experts.down_proj"],
    ),
}  # fmt: skip


def _family(name: str, folder: Path) -> Family:
    kind, fields, modules, tensors = FAMILIES[name]
    adapter: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": modules}
    if tensors:
        adapter["target_parameters"] = tensors
    return Family(name, folder, {"one": adapter, "other": adapter | {"r": 3}}, made=(kind, fields))


def _wanted(name: str) -> dict[str, Any]:
    """Settings: the layers that adapters may change, all linear ones unless experts are among them."""
    return {"lora_target_modules": (*FAMILIES[name][2], "experts") if FAMILIES[name][3] else ()}


@pytest.mark.parametrize("name", ["qwen3_next", *(thorough(n) for n in FAMILIES if n != "qwen3_next")])
def test_adapters(name: str, tmp_path: Path) -> None:
    """Alone, and mixed in one batch."""
    family = _family(name, tmp_path)
    with _open(family, **_wanted(name)) as llm:
        for adapters in ([None, None], ["one", "one"], [None, "one", "other", "one", "other"]):
            family.check(_run(family, llm, adapters, seed=1), adapters)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_over_a_quantized_checkpoint(name: str, tmp_path: Path) -> None:
    family, adapters = _family(name, tmp_path), [None, "one", "other", "one"]
    assert any("in_proj" in name for name in in_float8(family, tmp_path, ["one", "other"]))
    with _open(family, **_wanted(name)) as llm:
        family.check(_run(family, llm, adapters, seed=1), adapters, 1e-3)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "granite_hybrid"])
def test_ranks_have_their_outputs(name: str, tmp_path: Path) -> None:
    """The outputs of a rank's tables are the rows of its weight."""
    load_ops()
    _family(name, tmp_path)
    fields = open_source(tmp_path / "model").config
    whole = make_plan(model := find_model(fields), model.config(fields), "float32")
    divided = shard_plan(whole, 2)
    for entry in (e for e in divided if e.name.endswith((".in_proj", ".qkvz", ".beta_gate"))):
        found = adapted_layer(divided, entry.name)
        assert found is not None
        assert sum(found.own_widths) == entry.shape[0] == found.own_tables(4)[1][1]
        assert entry.shape[0] < whole[entry.name].shape[0]
        assert sum(found.widths) == whole[entry.name].shape[0]
