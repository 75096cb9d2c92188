"""Whole multimodal checkpoints run as their text model, with transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from graphllm.compile.families import find_model
from graphllm.config import ConfigError
from graphllm.loading.checkpoint.source import open_source
from tests.tiers import thorough

_TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": _TEXT | {"sliding_window": 8, "query_pre_attn_scalar": 8}, "vision_config": _VISION,
        "mm_tokens_per_image": 4, "tie_word_embeddings": True,
    },
    "Mistral3": {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None}, "tie_word_embeddings": False,
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
    },
    "Qwen3_5": {
        "text_config": _TEXT | {
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
                                "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "num_position_embeddings": 16},
        "tie_word_embeddings": False,
    },
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
_WHOLE["Qwen3_5Moe"] = _WHOLE["Qwen3_5"] | {"text_config": _WHOLE["Qwen3_5"]["text_config"] | _MOE}
# How programs have named the text model's tensors.
_NAMES = {
    "now": ("model.language_model.", "lm_head."),
    "older": ("language_model.model.", "language_model.lm_head."),
}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Gemma3", "older"),
        ("Mistral3", "now"),
        ("Qwen3_5", "now"),
        thorough("Gemma3", "now"),
        thorough("Mistral3", "older"),
    ],
)
def test_the_text_model_runs(name: str, names: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**_WHOLE[name])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    inner, head = _NAMES[names]
    tied = config.tie_word_embeddings
    tensors = {
        n.replace("model.language_model.", inner).replace("lm_head.", head): t.contiguous().clone()
        for n, t in model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    from tests.models import driver

    prompt = torch.randint(3, 90, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, _ = driver.Driver(tmp_path, "eager", settings={"max_model_len": 64}).generate([prompt], 1)
    with torch.no_grad():
        torch.testing.assert_close(logits[0], model(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=0)
    assert f"{name}ForConditionalGeneration is multimodal and runs as its text model" in caplog.text
    changed = open_source(tmp_path, overrides={"text_config": {"rms_norm_eps": 0.5}, "rope_theta": 7.0}).config
    assert (changed["rms_norm_eps"], changed["rope_theta"]) == (0.5, 7.0)


def test_other_text_models_are_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "new_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"architectures: missing \(model_type 'new_text'\) is not supported"):
        find_model(open_source(tmp_path).config)
    config["architectures"] = ["LlavaForConditionalGeneration"]
    with pytest.raises(ConfigError, match="nor is it one of the multimodal models that run as text"):
        find_model(config)
