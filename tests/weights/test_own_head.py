"""A head of its own beside a config.json that ties it to the embedding: both tables are those of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphllm.compile.families import find_model
from graphllm.loading.checkpoint.source import open_source
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import make_plan
from tests.tiers import thorough

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ALSO: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "Qwen3": {"head_dim": 16},
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "GPTJ": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 8},
    "Falcon": {},
    "Mpt": {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64},
    "OPT": {"ffn_dim": 48, "init_std": 0.3, "word_embed_proj_dim": 32},
}
_EMBEDDINGS = (
    "model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight",
)  # fmt: skip


def _saved(folder: Path, family: str) -> str:
    """A checkpoint of two different tables whose config.json ties them; the name of the embedding."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        **_SIZES, **_ALSO.get(family, {}), tie_word_embeddings=False, attn_implementation="eager"
    )
    made = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    made.save_pretrained(folder)
    _configure(folder, tie_word_embeddings=True)
    return next(name for name in _EMBEDDINGS if name in load_file(folder / "model.safetensors"))


def _configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _same_tables(folder: Path) -> None:
    """The embedding and the head are those of transformers."""
    source = open_source(folder)
    assert source.checkpoint is not None
    model = find_model(source.config)
    plan = make_plan(model, model.config(source.config), "float32")
    found = load_weights(plan, source.checkpoint)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(found["embed.tokens"], theirs.get_input_embeddings().weight)
    assert torch.equal(found["head.lm_head"], theirs.get_output_embeddings().weight)


@pytest.mark.parametrize(
    "family",
    ["Llama", "GPT2", "OPT", "Gemma2", "Phi3", *map(thorough, ("Qwen2", "Qwen3", "Granite", "GPTJ", "Falcon", "Mpt"))],
)
def test_a_head_that_differs_is_used(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saved(tmp_path, family)
    with caplog.at_level(logging.WARNING):
        _same_tables(tmp_path)
    assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in caplog.text


def test_where_config_json_leaves_it_open(tmp_path: Path) -> None:
    """Gemma ties them then."""
    _saved(tmp_path, "Gemma2")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _same_tables(tmp_path)


@pytest.mark.parametrize("left", ["both", "head", "embedding"])
def test_equal_or_missing_ones_are_tied(left: str, tmp_path: Path) -> None:
    embedding = _saved(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors[embedding].clone()
    gone = {"both": "", "head": embedding, "embedding": "lm_head.weight"}[left]
    tensors.pop(gone, None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_source(tmp_path).config["tie_word_embeddings"] is True
    _same_tables(tmp_path)


def test_a_draft_models_head(tmp_path: Path) -> None:
    for name in ("model", "draft"):
        _saved(tmp_path / name, "Llama")
    found = open_source(tmp_path / "model", draft=tmp_path / "draft", method="draft_model").config
    assert found["draft"]["tie_word_embeddings"] is False
