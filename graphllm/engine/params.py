"""How a request is sampled and when it ends: `SamplingParams`, with vLLM's names and defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphllm.config import ConfigError

# What other servers accept and this one does not have yet, with the value that changes nothing; None never does.
_NEUTRAL: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "best_of": 1,
    "detokenize": True,
    "extra_args": None,
    "frequency_penalty": 0,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "logit_bias": {},
    "logits_processors": [],
    "logprob_token_ids": None,
    "logprobs": False,
    "min_tokens": 0,
    "presence_penalty": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "repetition_penalty": 1,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
_FROM_GENERATION_CONFIG = {"max_new_tokens": "max_tokens"} | {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
}


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. Raises ConfigError for values that make no sense, all of them at once.

    n: completions, 1 for now. temperature: 0 takes the most likely token. top_k: 0 (or -1) keeps all. top_p: keep the
    most likely tokens of this total probability. min_p: keep tokens of at least this share of the likeliest one's.
    seed: the same seed gives the same tokens; None (or -1) differs each time. max_tokens: None is up to the end of the
    context. ignore_eos: go on behind the end-of-sequence token. stop: strings that end the output, not part of it.
    stop_token_ids: tokens that end it. skip_special_tokens: leave them out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()  # a string or a list are taken too, here and below
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if problems := self._problems():
            raise ConfigError("; ".join(problems))

    def _problems(self) -> list[str]:
        max_tokens, seed = self.max_tokens, self.seed
        checks = (
            ("n", _is_int(self.n) and self.n == 1, "only 1 is supported; send the request several times"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "give a number from 0"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "give a number above 0, up to 1"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "give a whole number from 1, or 0 to keep all tokens"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "give a number from 0 to 1"),
            ("seed", seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63), "give a 64-bit integer or None"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "give strings that are not empty"),
            ("stop_token_ids", all(_is_int(i) and i >= 0 for i in self.stop_token_ids), "give token ids"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "give True or False"),
            ("max_tokens", max_tokens is None or (_is_int(max_tokens) and max_tokens >= 1), "give a number from 1"),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "give True or False"),
        )
        return [f"{name} is {getattr(self, name)!r}: {remedy}" for name, ok, remedy in checks if not ok]

    @staticmethod
    def from_fields(fields: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """From a request's fields; None means not given, then ``defaults`` hold.

        Fields without support are refused by name, never ignored, unless their value changes nothing.
        """
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        given = {name: value for name, value in fields.items() if value is not None}
        refused = [
            f"{name} is {value!r}: not supported; leave it out"
            for name, value in given.items()
            if name not in known and not _changes_nothing(name, value)
        ]
        if refused:
            raise ConfigError("; ".join(refused))
        return dataclasses.replace(
            defaults or SamplingParams(), **{name: value for name, value in given.items() if name in known}
        )

    @staticmethod
    def from_generation_config(config: Mapping[str, Any]) -> SamplingParams:
        """The defaults a checkpoint's ``generation_config.json`` gives. Like vLLM, do_sample is not looked at."""
        fields = {ours: config[theirs] for theirs, ours in _FROM_GENERATION_CONFIG.items() if theirs in config}
        try:
            return SamplingParams.from_fields(fields)
        except ConfigError as e:
            raise ConfigError(f"generation_config.json: {e}, or give the sampling parameters yourself") from e


def _changes_nothing(name: str, value: object) -> bool:
    """Of a field without support. ``logprobs`` 0 asks for something and False does not, so types count."""
    neutral = _NEUTRAL.get(name)
    return name in _NEUTRAL and value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else () if value is None else (value,)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
