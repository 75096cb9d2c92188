"""Sampling parameters: vLLM's defaults, every bad value named with a remedy, nothing unsupported ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from graphllm.engine.requests.request import EngineRequest
from graphllm.loading.checkpoint.model_files import ModelFiles

# As vLLM 0.33 documents them; stop, stop_token_ids and bad_words are None there, which says the same.
DEFAULTS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": (), "stop_token_ids": (), "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE, "structured_outputs": None, "logit_bias": None,
    "allowed_token_ids": None, "logprob_token_ids": None, "thinking_token_budget": None, "bad_words": (),
    "repetition_detection": None, "skip_reading_prefix_cache": None, "extra_args": None,
}  # fmt: skip


def test_defaults_and_normal_forms() -> None:
    p = SamplingParams()
    assert {name: getattr(p, name) for name in DEFAULTS} == DEFAULTS
    assert set(vars(p)) == set(DEFAULTS)
    loose: dict[str, Any] = {
        "stop": "a", "stop_token_ids": [1, 2], "seed": -1, "top_k": -1, "bad_words": ["x"], "allowed_token_ids": [3],
        "logit_bias": {"3": 101, 4: float("-inf"), 5: 1}, "logprobs": True, "prompt_logprobs": False,
        "structured_outputs": {"choice": ["a", "b"], "regex": None},
    }  # fmt: skip
    assert SamplingParams(**loose) == SamplingParams(
        stop=("a",),
        stop_token_ids=(1, 2),
        bad_words=("x",),
        allowed_token_ids=(3,),
        logit_bias={3: 100.0, 4: -100.0, 5: 1.0},
        logprobs=1,
        structured_outputs=StructuredOutputsParams(choice=("a", "b")),
    )
    assert SamplingParams.from_fields({"stop": ["a", "b"]}).stop == ("a", "b")
    assert SamplingParams.from_fields({"logprobs": 0}).logprobs == 0
    assert hash(p) == hash(SamplingParams())
    hash(SamplingParams(**loose))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", True), ("n", 16385), ("n", 1.0),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("frequency_penalty", "1"),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", float("inf")),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", 1.0), ("stop", ["a", ""]), ("stop", [1]), ("stop", 3), ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]), ("max_tokens", 0), ("max_tokens", 1.0), ("ignore_eos", 1), ("min_tokens", -1),
        ("min_tokens", 1.0), ("logprobs", -2), ("logprobs", 1.0), ("prompt_logprobs", -2), ("detokenize", 0),
        ("skip_special_tokens", "no"), ("spaces_between_special_tokens", 1), ("include_stop_str_in_output", "x"),
        ("output_kind", 1), ("structured_outputs", "json"), ("logit_bias", [1]), ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1}), ("logit_bias", {1: "x"}), ("logit_bias", {1: float("nan")}),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("bad_words", [""]), ("bad_words", [1]),
        ("skip_reading_prefix_cache", 1), ("extra_args", [1]), ("repetition_detection", 3),
    ],
)  # fmt: skip
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} is .*: give"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 16384), ("presence_penalty", -2), ("frequency_penalty", 2), ("repetition_penalty", 1e-3),
        ("repetition_penalty", 50), ("temperature", 0), ("top_p", 1e-6), ("min_p", 1), ("seed", -(2**63)),
        ("min_tokens", 16), ("logprobs", -1), ("prompt_logprobs", 0), ("max_tokens", None), ("stop_token_ids", None),
    ],
)  # fmt: skip
def test_values_at_the_border(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == (() if value is None and "stop" in field else value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2, "temperature": 0}, "n is 2: with temperature 0"),
        ({"min_tokens": 17}, "min_tokens is 17: give at most max_tokens, which is 16"),
        ({"stop": "a", "detokenize": False}, r"stop is \('a',\): with detokenize=False"),
    ],
)
def test_values_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SamplingParams(**fields)


def test_all_bad_values_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^temperature is -1: .*; top_p is 2: .*; max_tokens is 0: "):
        SamplingParams(temperature=-1, top_p=2, max_tokens=0)


def test_fields_of_a_request() -> None:
    defaults = SamplingParams(temperature=0.6, max_tokens=99)
    fields: dict[str, Any] = {
        "temperature": None,
        "top_k": 5,
        "presence_penalty": 0.5,
        "logit_bias": {},
        "logprobs": False,
        "best_of": 1,
        "use_beam_search": False,
    }
    assert SamplingParams.from_fields(fields, defaults) == SamplingParams(
        temperature=0.6, max_tokens=99, top_k=5, presence_penalty=0.5
    )
    bad = {"best_of": 2, "length_penalty": 2, "temprature": 0, "use_beam_search": 0, "top_k": 1}
    with pytest.raises(ConfigError) as e:
        SamplingParams.from_fields(bad)
    message = str(e.value)
    assert re.findall(r"(\w+) is (\d)", message) == [
        ("best_of", "2"), ("length_penalty", "2"), ("temprature", "0"), ("use_beam_search", "0")
    ]  # fmt: skip
    assert "temprature is 0: not supported; leave it out, or did you mean temperature?" in message
    with pytest.raises(ConfigError, match=r"best_of is 2: .*; use n; .*temprature is 0"):
        SamplingParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs has no constraint: give exactly one of json, regex, choice, grammar, json_object"),
        ({"json_object": False}, "structured_outputs has no constraint"),
        ({"regex": "a", "json": "{}"}, "structured_outputs has json and regex: give exactly one"),
        ({"json": [1]}, r"structured_outputs.json is \[1\]: give a JSON schema"),
        ({"regex": 1}, r"structured_outputs.regex is 1: give"),
        ({"choice": []}, r"structured_outputs.choice is \(\): give a list"),
        ({"choice": ["a", 1]}, r"structured_outputs.choice is .*: give a list"),
        ({"grammar": {}}, r"structured_outputs.grammar is \{\}: give"),
        ({"json_object": 1}, r"structured_outputs.json_object is 1: give"),
        ({"regex": "a", "disable_any_whitespace": None}, r"structured_outputs.disable_any_whitespace is None: give"),
        ({"regex": "a", "whitespace_pattern": 1}, r"structured_outputs.whitespace_pattern is 1: give"),
    ],
)
def test_structured_outputs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        StructuredOutputsParams(**fields)


def test_structured_outputs_of_a_request() -> None:
    wanted = {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "structural_tag": None}}
    found = SamplingParams.from_fields(wanted).structured_outputs
    assert found == StructuredOutputsParams(json={}, disable_any_whitespace=True)
    with pytest.raises(ConfigError, match=r"structured_outputs.structural_tag is 'x': not supported; leave it out"):
        SamplingParams.from_fields({"structured_outputs": {"structural_tag": "x"}})


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json])
def test_survives_the_wire(codec: Any) -> None:
    params = SamplingParams(
        n=2, seed=-(2**63), stop=("ä", "b"), logit_bias={3: 1.5, 0: -100}, logprobs=-1, allowed_token_ids=(1, 2),
        structured_outputs=StructuredOutputsParams(json={"type": "object", "n": [1, None]}), bad_words=("x",),
        output_kind=RequestOutputKind.DELTA, extra_args={"a": [1, {"b": None}]}, max_tokens=None,
    )  # fmt: skip
    for p in (SamplingParams(), params):
        request = EngineRequest(id="a", prompt=[1], params=p, stop_ids=[1], limit=3, seed=-1)
        back = codec.decode(codec.encode(request), type=EngineRequest)
        assert back == request
        assert {k: type(v) for k, v in vars(back.params).items()} == {k: type(v) for k, v in vars(p).items()}


def test_generation_config(tmp_path: Path) -> None:
    config = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
        "max_new_tokens": 7,
        "do_sample": True,
        "min_p": None,
    }
    expected = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, max_tokens=7, repetition_penalty=1.1)
    assert SamplingParams.from_generation_config({**config, "eos_token_id": [1, 2]}) == expected
    with pytest.raises(
        ConfigError, match=r"generation_config.json: repetition_penalty is 0: give a number above 0, or"
    ):
        SamplingParams.from_generation_config({"repetition_penalty": 0})
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    assert ModelFiles.read(tmp_path).generation == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(config))
    assert SamplingParams.from_generation_config(ModelFiles.read(tmp_path).generation) == expected
    for damage in ("{", "[1]"):
        file.write_text(damage)
        with pytest.raises(ConfigError, match=r"generation_config.json: damaged"):
            _ = ModelFiles.read(tmp_path).generation


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 0), ("beam_width", True), ("max_tokens", 0), ("temperature", -1), ("length_penalty", "1"),
     ("ignore_eos", 1), ("include_stop_str_in_output", None)],
)  # fmt: skip
def test_beam_search(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"beam_width": 2, "max_tokens": 3}
    p = BeamSearchParams(**fields)
    assert (p.ignore_eos, p.temperature, p.length_penalty, p.include_stop_str_in_output) == (False, 0.0, 1.0, False)
    with pytest.raises(ConfigError, match=rf"^{field} is {value!r}: give"):
        BeamSearchParams(**{**fields, field: value})
