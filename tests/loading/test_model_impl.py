"""Whose code defines a model: the setting, what it does to keys and messages, and what artifacts say of it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphllm import LLM, SamplingParams
from graphllm.compile.families import find_model
from graphllm.config import ConfigError, EngineArgs
from graphllm.config.fields import MODEL_IMPL
from graphllm.ir.registry import load_models
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import find_source
from graphllm.program import artifact
from graphllm.program.implementation import is_named

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "backend": "eager", "target": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16,
    "skip_tokenizer_init": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(transformers.LlamaForCausalLM, transformers.LlamaConfig, tmp_path_factory)


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an architecture without a family here."""
    return _saved(transformers.Olmo2ForCausalLM, transformers.Olmo2Config, tmp_path_factory)


def _saved(model: Any, config: Any, place: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = place.mktemp("model")
    model(config(**SIZES)).save_pretrained(folder)
    return folder


def test_words() -> None:
    assert EngineArgs("m").model_impl == "auto"
    assert EngineArgs("m", model_impl="vllm").model_impl == "graphllm"
    assert EngineArgs("m", model_impl="transformers").model_impl == "transformers"
    with pytest.raises(ConfigError, match="model_impl is 'terratorch': use auto, graphllm or transformers"):
        EngineArgs("m", model_impl="terratorch")


def test_every_family_is_found_by_its_name() -> None:
    """Without an import: the key of what is not found has transformers' version."""
    assert not [name for name in load_models() if not is_named({"architectures": [name]})]
    assert not is_named({"architectures": ["Olmo2ForCausalLM"]})
    assert not is_named({"architectures": ["BertLMHeadModel"]})


def _factors(folder: Path, model_impl: str) -> artifact.Factors:
    args = EngineArgs(str(folder), model_impl=model_impl, **SETTINGS)
    source = find_source(args)
    return artifact.key_factors(source.config, source.tensors, compile_config(source.config, args))


def test_keys(llama: Path, olmo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of models that transformers' code defines depend on its version, and no others do."""
    own, same, traced = (_factors(llama, word) for word in ("auto", "graphllm", "transformers"))
    assert artifact.key_of(own) == artifact.key_of(same) != artifact.key_of(traced)
    assert "transformers" not in own.versions
    assert traced.versions["transformers"] == transformers.__version__
    other = _factors(olmo, "auto")
    version = importlib.metadata.version
    monkeypatch.setattr(
        "graphllm.program.implementation.version", lambda name: "9" if name == "transformers" else version(name)
    )
    assert artifact.key_of(_factors(llama, "auto")) == artifact.key_of(own)
    assert artifact.key_of(_factors(olmo, "auto")) != artifact.key_of(other)


def test_an_artifact_says_it(
    llama: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, a line of `inspect`, and greedy tokens that are those of the family's file."""
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path))
    sampling, tokens = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
    for word in ("graphllm", "transformers"):
        with caplog.at_level(logging.WARNING), LLM(llama, model_impl=word, **SETTINGS) as llm:
            found = llm.generate({"prompt_token_ids": [5, 9, 3]}, sampling, use_tqdm=False)
            tokens.append(found[0].outputs[0].token_ids)
        said = [r.message for r in caplog.records if "LlamaForCausalLM" in r.message]
        assert len(said) == (word == "transformers")
    assert tokens[0] == tokens[1]
    assert said[0].startswith("model: transformers' LlamaForCausalLM, ")
    made = [artifact.Artifact.open(f.parent) for f in (tmp_path / "artifacts").glob("*/manifest.json")]
    own, traced = sorted(made, key=lambda a: a.manifest.implementation.transformers)
    assert own.manifest.implementation.name == "model_defs/llama.py"
    assert not own.manifest.implementation.ordinary
    assert "model_defs/llama.py" in cli("inspect", own.folder).out
    assert "transformers' LlamaForCausalLM" in cli("inspect", traced.folder).out
    with pytest.raises(
        ConfigError, match=r"config.json.model_impl: artifact has 'transformers', here it is \(absent\)"
    ):
        LLM(llama, artifact=str(traced.folder), **SETTINGS)


def _refused(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        find_model(config)
    return str(refused.value)


def test_refusals(olmo: Path) -> None:
    config = json.loads((olmo / "config.json").read_text())
    own = _refused(config | {MODEL_IMPL: "graphllm"})
    assert "['Olmo2ForCausalLM'] (model_type 'olmo2') is not supported" in own
    assert "model_impl is 'graphllm', which leaves it out; use auto" in own
    assert "docs/adding-a-model.md" in own
    nobody = _refused(config | {"model_type": "new", "architectures": ["NewForCausalLM"]})
    assert "model_type is 'new', which transformers does not know" in nobody
    assert "LlamaForCausalLM" in nobody
    code = _refused(config | {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "m.New"}})
    assert "auto_map says that Olmo2ForCausalLM is code of the repository's own, which never runs" in code
    lacking = _refused({"architectures": ["MiMoForCausalLM"], "model_type": "mimo", MODEL_IMPL: "transformers"})
    assert lacking.startswith("model_impl is 'transformers': config.json: model_type is 'mimo'")
    assert lacking.endswith("use auto, which takes graphllm's own MiMoForCausalLM")
    both = _refused({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True})
    assert "is_encoder_decoder is true: only decoders alone run; use a decoder-only model" in both


def test_code_of_a_repository_is_not_needed_where_transformers_has_the_model(olmo: Path) -> None:
    """A checkpoint from before transformers knew it names its own code."""
    config = json.loads((olmo / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "m.Olmo"}}
    assert find_model(config).architectures == ("Olmo2ForCausalLM",)


def test_a_draft_model_of_transformers_counts(llama: Path, olmo: Path) -> None:
    args = EngineArgs(str(llama), speculative_model=str(olmo), num_speculative_tokens=2, **SETTINGS)
    source = find_source(args)
    factors = artifact.key_factors(source.config, source.tensors, compile_config(source.config, args))
    assert factors.versions["transformers"] == transformers.__version__
