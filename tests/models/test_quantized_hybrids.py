"""Hybrids, attention over latents and older decoders in quantized checkpoints: what transformers gives with the numbers
that they stand for. Matrices stay encoded, those, too, whose rows are sorted while they are read, but not those that no
linear layer reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import driver
from tests.models import test_parity as parity
from tests.models.sharded import Sharded
from tests.tiers import thorough
from tests.weights.quantized import FORMATS

BASE: dict[str, Any] = parity.IDS | {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "intermediate_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "head_dim": 32, "num_hidden_layers": 3, "layer_types": parity.HYBRID, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
NEMOTRON: dict[str, Any] = parity.STEPS | {
    "head_dim": 16, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "layers_block_type": ["linear_attention", "moe", "full_attention"],
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "num_heads": 16, "head_dim": 8, "n_groups": 2, "state_size": 32, "num_hidden_layers": 2, "expand": 2,
    "chunk_size": 8,
}  # fmt: skip
LFM2 = {"num_hidden_layers": 3, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 2, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 40, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
INDEXED = DEEPSEEK | {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 32}
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 32, "moe_intermediate_size": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2, "linear_num_heads": 4, "linear_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FALCON: dict[str, Any] = {"num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 2}
CODEGEN = parity.IDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "initializer_range": 0.3}
HYBRIDS = {
    "qwen3_next": parity.Arch("qwen3_next", "Qwen3Next", BASE | DELTA),
    "qwen3_5": parity.Arch("qwen3_5", "Qwen3_5Text", BASE | DELTA),
    "mamba2": parity.Arch("mamba2", "Mamba2", BASE | MAMBA2),
    "lfm2": parity.Arch("lfm2", "Lfm2", BASE | LFM2),
    "nemotron_h": parity.Arch("nemotron_h_moe", "NemotronH", BASE | NEMOTRON),
    "deepseek_v3": parity.Arch("deepseek_v3", "DeepseekV3", BASE | DEEPSEEK),
    "deepseek_v32": parity.Arch("deepseek_v32", "DeepseekV32", BASE | INDEXED),
    "kimi_linear": parity.Arch("kimi_linear", "KimiLinear", BASE | KIMI),
}
OLDER = {
    "falcon": parity.Arch("falcon_grouped", "Falcon", BASE | FALCON),
    "codegen": parity.Arch("codegen", "CodeGen", CODEGEN),
    "mpt": parity.Arch("mpt", "Mpt", parity.MPT | {"tie_word_embeddings": False}),
}
ARCHS = HYBRIDS | OLDER
# Parts of names that quantizers leave as they are.
PLAIN_ONLINE = ("conv1d", "conv.conv", "embed", "wte", "gate.weight", "kv_b_proj", "A_log")
PLAIN = (
    "lm_head", "embed", "wte", "gate.weight", "shared_expert_gate", "norm", "in_proj_b", "in_proj_a", "weights_proj",
    ".b_proj",
)  # fmt: skip


def _write(arch: parity.Arch, kind: str, folder: Path) -> tuple[Path, Any]:
    """A checkpoint with its linear layers in a format, and transformers' model with the numbers that it stands for."""
    model, made = parity._build(arch, arch.config), FORMATS[kind]
    model.save_pretrained(folder / "plain")
    (folder / "stored").mkdir()
    stored, numbers = {}, {}
    for name, tensor in load_file(folder / "plain" / "model.safetensors").items():
        stored[name] = numbers[name] = tensor.clone()
        if tensor.dim() != 2 or not name.endswith(".weight") or any(part in name for part in PLAIN):
            continue
        parts, exact = made.encode(tensor)
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{n}": t.clone().contiguous() for n, t in parts.items()}
        numbers[name] = exact.float().contiguous()
    save_file(numbers, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "stored" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "plain" / "config.json").read_text()) | {"quantization_config": made.config}
    (folder / "stored" / "config.json").write_text(json.dumps(config))
    assert isinstance(model, transformers.PreTrainedModel)
    return folder / "stored", type(model).from_pretrained(folder / "plain", attn_implementation="eager").eval()


def _check(runner: Any, model: Any) -> None:
    prompts = [torch.randint(parity.V, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 40)]
    logits, tokens = runner.generate(prompts, 4)
    for prompt, found, drawn in zip(prompts, logits, tokens, strict=True):
        expected = parity._forced(model, prompt, drawn)
        torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=0)
        assert drawn == expected.argmax(-1).tolist()


def _encoded(place: Path) -> set[str]:
    """The weights of layers that are kept as codes with their scales."""
    names = [entry["name"] for entry in json.loads((place / "weights.json").read_text())["entries"]]
    return {name.split(".")[2] for name in names if name.startswith("layers.") and name.endswith(".scales")}


KEPT = {
    "qwen3_next": {"qkvz", "o", "qkv", "gate_up", "down", "shared_gate_up", "shared_down"},
    "qwen3_5": {"qkvz", "o", "qkv", "gate_up", "down"},
    "mamba2": {"in_proj", "out_proj"},
    "lfm2": {"in_proj", "out_proj", "qkv", "o", "gate_up", "down"},
    "nemotron_h": {"in_proj", "out_proj", "qkv", "o", "up", "down", "expert_up", "expert_down"},
    "deepseek_v3": {"q_kv", "q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down"},
    "deepseek_v32": {"q_kv", "q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down", "index_q", "index_k"},
    "kimi_linear": {"qkv", "decay", "gate", "o", "q_kv", "gate_up", "down", "shared_gate_up", "shared_down"},
    "falcon": {"qkv", "o", "up", "down"},
    "codegen": {"qvk", "o", "up", "down"},
    "mpt": {"qkv", "o", "up", "down"},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_next", "awq"),
        *(thorough("qwen3_next", kind) for kind in ("gptq 4 bits", "fp8 tensors", "fp8 blocks", "packed int4")),
        *(thorough(name, kind) for name in HYBRIDS if name != "qwen3_next" for kind in ("packed int4", "fp8 blocks")),
        *(thorough(name, kind) for name in OLDER for kind in ("packed int4", "awq")),  # turns are no blocks of fp8
    ],
)
@torch.no_grad()
def test_checkpoints(name: str, kind: str, tmp_path: Path) -> None:
    folder, model = _write(ARCHS[name], kind, tmp_path)
    runner = driver.Driver(folder, "eager")
    _check(runner, model)
    assert _encoded(runner.place) == KEPT[name]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_next", "awq"),
        ("qwen3_next", "fp8 blocks"),
        ("mamba2", "packed int4"),
        ("nemotron_h", "gptq 4 bits"),
        ("deepseek_v3", "fp8 blocks"),
        ("kimi_linear", "packed int4"),
    ],
)
@torch.no_grad()
def test_two_ranks(name: str, kind: str, tmp_path: Path) -> None:
    folder, model = _write(ARCHS[name], kind, tmp_path)
    opened: list[Sharded] = []

    def ranks_of(place: Path, checkpoint: Any) -> Sharded:
        opened.append(Sharded(place, checkpoint, 2, num_blocks=64))
        return opened[0]

    runner = driver.Driver(folder, "eager", settings={"tensor_parallel_size": 2}, opened=ranks_of)
    with opened[0]:
        _check(runner, model)
    assert _encoded(runner.place) == KEPT[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ARCHS)
@torch.no_grad()
def test_rounded_while_they_are_read(name: str, tmp_path: Path) -> None:
    """To eight bits, in groups of 64, but for routers, convolutions, tables and what makes keys of latents."""
    model = parity._build(ARCHS[name], ARCHS[name].config)
    model.save_pretrained(tmp_path)
    for parameter, matrix in model.named_parameters():
        if matrix.dim() > 1 and not any(part in parameter for part in PLAIN_ONLINE):
            for group in matrix.split(64, -1):
                scale = (group.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
                group.copy_((group / scale).round().clamp(-127, 127) * scale)
    runner = driver.Driver(tmp_path, "eager", settings={"quantization": "int8"})
    _check(runner, model)
    assert KEPT[name] <= _encoded(runner.place)
