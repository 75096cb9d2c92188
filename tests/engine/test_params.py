"""Sampling parameters: vLLM's defaults, every bad value named with a remedy, nothing unsupported ignored."""

from __future__ import annotations

from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.engine.params import SamplingParams


def test_defaults_and_normal_forms() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.max_tokens) == (1, 1.0, 1.0, 0, 0.0, None, 16)
    assert (p.stop, p.stop_token_ids, p.ignore_eos, p.skip_special_tokens) == ((), (), False, True)
    loose: dict[str, Any] = {"stop": "a", "stop_token_ids": [1, 2], "seed": -1, "top_k": -1}
    assert SamplingParams(**loose) == SamplingParams(stop=("a",), stop_token_ids=(1, 2))
    assert SamplingParams.from_fields({"stop": ["a", "b"]}).stop == ("a", "b")
    assert hash(p) == hash(SamplingParams())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", True),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", 1.0), ("stop", ["a", ""]), ("stop", [1]), ("stop", 3), ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]), ("max_tokens", 0), ("max_tokens", 1.0), ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
    ],
)  # fmt: skip
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} is .*: (give|only)"):
        SamplingParams(**{field: value})


def test_all_bad_values_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^temperature is -1: .*; top_p is 2: .*; max_tokens is 0: "):
        SamplingParams(temperature=-1, top_p=2, max_tokens=0)


def test_fields_of_a_request() -> None:
    defaults = SamplingParams(temperature=0.6, max_tokens=99)
    fields: dict[str, Any] = {
        "temperature": None,
        "top_k": 5,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "best_of": 1,
    }
    assert SamplingParams.from_fields(fields, defaults) == SamplingParams(temperature=0.6, max_tokens=99, top_k=5)
    bad = {"presence_penalty": 0.5, "min_tokens": 1, "temprature": 0, "logprobs": 0, "top_k": 1}
    with pytest.raises(ConfigError) as e:
        SamplingParams.from_fields(bad)
    assert str(e.value).split("; leave it out")[:-1] == [
        "presence_penalty is 0.5: not supported",
        "; min_tokens is 1: not supported",
        "; temprature is 0: not supported",
        "; logprobs is 0: not supported",
    ]
    with pytest.raises(TypeError, match="presence_penalty"):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_generation_config() -> None:
    config = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.0,
        "max_new_tokens": 7,
        "do_sample": 1,
    }
    assert SamplingParams.from_generation_config({**config, "eos_token_id": [1, 2]}) == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, max_tokens=7
    )
    with pytest.raises(ConfigError, match=r"generation_config.json: repetition_penalty is 1.1: not supported"):
        SamplingParams.from_generation_config({"repetition_penalty": 1.1})
