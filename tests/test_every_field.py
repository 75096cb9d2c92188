"""Every field of every file of a checkpoint is used, or refused, or told to the user, or has a reason to do nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from graphllm.compile.described import described, unread_fields
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.text import Tokenizer
from graphllm.ir.registry import load_models
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.loading.checkpoint.sentence_transformers import SentenceFiles
from graphllm.loading.checkpoint.unread_files import warn_unread
from graphllm.weights.checkpoint import inert_fields
from graphllm.weights.checkpoint.inert_fields import CONFIG, GENERATION, QUANTIZATION, unknown_fields
from graphllm.weights.plan.schemes import scheme_of
from tests.models.test_config import FAMILIES, LLAMA, PUBLISHED, PUBLISHED_RECURRENT
from tests.models.test_older_decoders import OLDER
from tests.weights.quantized import FORMATS

MODELS = load_models()
OTHERS = ("GPT2", "OPT", "Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert", "NomicBert", "Camembert")
RECURRENT = ("Mamba", "FalconMamba", "Jamba")
DECODERS = ("GPTJ", "CodeGen", "GPTNeo", "Falcon", "Bloom", "Mpt")
DOCS = Path(__file__).parents[1] / "docs" / "checkpoints.md"
# A value for a field that is not the usual one, by the type of that.
_OTHER: dict[type, Any] = {
    bool: lambda v: not v,
    int: lambda v: v + 1,
    float: lambda v: v * 2 + 1,
    str: lambda v: "strange",
}


def _whole(family: str) -> dict[str, Any]:
    """A config.json that says all that transformers' class knows."""
    sizes = {} if family in OTHERS + RECURRENT + DECODERS else LLAMA | FAMILIES[family] | {"num_key_value_heads": 4}
    config = getattr(transformers, f"{family}Config")(**{n: v for n, v in sizes.items() if n != "architectures"})
    ends = {"GPT2": "LMHeadModel"} | dict.fromkeys(OTHERS[2:], "Model")
    name = family.removesuffix("Text") + ends.get(family, "ForCausalLM")
    return config.to_dict() | {"architectures": [name]}


def _read(hf: dict[str, Any]) -> tuple[Any, list[str]]:
    """What the family makes of it, and what it says is not read."""
    fields = described(hf, 64)
    c = MODELS[hf["architectures"][0]].config(fields)
    return c, unread_fields(fields)


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_RECURRENT, *OLDER])
def test_published_files_are_read_whole(name: str) -> None:
    assert _read({**PUBLISHED, **PUBLISHED_RECURRENT, **OLDER}[name][1])[1] == []


# What is asked for and decides nothing in these small models, of which no layer has a window, and rotation is plain.
_DECIDE_ELSEWHERE = {
    "use_sliding_window", "sliding_window", "mlp_only_layers", "original_max_position_embeddings", "local_attention",
    "max_position_embeddings",
}  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, *RECURRENT, *DECODERS])
def test_config_json(family: str) -> None:
    """Field by field: with another value the config is another one, or refused, or the field is told or inert."""
    hf = _whole(family)
    usual, _ = _read(hf)
    decides = 0
    for name, value in hf.items():
        changed = {**hf, name: _OTHER.get(type(value), lambda v: {"x": 1})(value)}
        if name == "architectures" or not unknown_fields({name: changed[name]}, CONFIG):
            continue
        try:
            c, unread = _read(changed)
        except ConfigError:
            decides += 1
            continue
        told = any(entry.partition(".")[0] == name for entry in unread)
        decides += c != usual
        assert c != usual or told or name in _DECIDE_ELSEWHERE, name
    assert decides > 4
    assert [n for n in _read({**hf, "brand_new": 3})[1] if "new" in n] == ["brand_new"]


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_rotary_settings(where: str) -> None:
    """Those of another type than the one that is chosen are told."""
    rope = {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0, "new": 3.0, "rope_theta": 1e4}
    assert _read(LLAMA | {where: rope})[1] == [f"{where}.low_freq_factor", f"{where}.new"]


@pytest.mark.parametrize("name", FORMATS)
def test_quantization_config(name: str) -> None:
    """Field by field: with another value other modules are read otherwise, or it is refused, told or inert."""
    config = FORMATS[name].config
    hf = {**LLAMA, "quantization_config": config}
    assert [n for n in _read(hf)[1] if "quant" in n] == []

    def read(changed: dict[str, Any]) -> Any:
        scheme = scheme_of({"quantization_config": changed})
        assert scheme is not None
        return [scheme(module) for module in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.0.down_proj")]

    for field, value in config.items():
        changed = {**config, field: _OTHER.get(type(value), lambda v: {"x": 1})(value)}
        try:
            found = read(changed)
        except ConfigError:
            continue
        told = f"quantization_config.{field}" in _read({**LLAMA, "quantization_config": changed})[1]
        assert found != read(config) or told or not unknown_fields({field: 1}, QUANTIZATION), field
    new = {**LLAMA, "quantization_config": {**config, "brand_new": 3}}
    assert "quantization_config.brand_new" in _read(new)[1]


def _warn(folder: Path) -> None:
    files = ModelFiles.read(folder)
    warn_unread(files.generation, files.sentences, None, {})


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # `Tokenizer` has them


def test_generation_config_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = transformers.GenerationConfig().to_dict() | {"brand_new": "x"}
    for name in fields:
        value = {"eos_token_id": 3, "temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "do_sample": False}.get(name, 7)
        (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
        caplog.clear()
        _warn(tmp_path)
        generation = ModelFiles.read(tmp_path).generation
        used = SamplingParams.from_generation_config(generation) != SamplingParams() or name in _TOKEN_IDS
        told = f"generation_config.json: {name}: not read, and without effect here" in caplog.text
        assert used != told or not unknown_fields({name: 7}, GENERATION), name
    (tmp_path / "generation_config.json").write_text(json.dumps(transformers.GenerationConfig().to_dict()))
    caplog.clear()
    _warn(tmp_path)
    assert not caplog.text  # values that are off


def test_tokenizer_config_json(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it says another thing than tokenizer.json."""
    told = json.loads((checkpoint / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_folder(checkpoint)
    for more, message in (
        ({}, ""),
        ({"split_special_tokens": True}, "tokenizer_config.json: split_special_tokens: not read, and without effect"),
        ({"add_eos_token": True}, "add_eos_token is True, but tokenizer.json puts none after a text"),
        ({"add_bos_token": True}, "add_bos_token is True, but tokenizer.json puts none before a text"),
        ({"add_bos_token": False, "add_eos_token": False, "legacy": True}, ""),
    ):
        caplog.clear()
        warn_unread({}, SentenceFiles.read(tmp_path), tokenizer, told | more)
        assert message in caplog.text
        assert bool(message) == bool(caplog.text)


def test_files_of_sentence_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "include_prompt": True}
    files = {
        "config_sentence_transformers.json": {"__version__": {"x": "1"}, "prompts": {}, "similarity_fn_name": "cosine"},
        "sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    _warn(tmp_path)
    assert not caplog.text
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields | {"brand_new": 1, "similarity_fn_name": "dot"}))
    _warn(tmp_path)
    assert caplog.text.count(": brand_new: not read, and without effect here") == 3
    assert "similarity_fn_name is 'dot': scores of two vectors are their cosine" in caplog.text


def test_the_table_of_the_docs() -> None:
    section = DOCS.read_text().partition("## Every field")[2]
    rows = [re.sub(r"[`\\]", "", line) for line in section.splitlines() if line.startswith("| ")]
    for name in ("CONFIG", "ROPE", "QUANTIZATION", "GENERATION", "TOKENIZER", "SENTENCES"):
        for fields, why in getattr(inert_fields, name).items():
            wanted = f"| {fields} | {why} |".replace("`", "")
            assert any(row.endswith(wanted) for row in rows), wanted
