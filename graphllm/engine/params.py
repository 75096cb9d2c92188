"""How a request is sampled and when it ends: `SamplingParams`, `StructuredOutputsParams` and `BeamSearchParams`, with
vLLM's names, meanings and defaults."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError

MAX_N = 16384  # completions of one request; more is a mistake, and each costs the front memory before it runs

# What other servers accept and this one does not have yet, with the value that changes nothing; None never does.
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "flat_logprobs": False,
    "length_penalty": 1,
    "logits_processors": [],
    "logprob_token_ids": None,
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "stream_interval": 1,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "watermarking": False,
}
_FROM_GENERATION_CONFIG = {"max_new_tokens": "max_tokens"} | {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
}
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_TOLD = 10  # mistakes that one error tells
_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(enum.Enum):
    """What each output of a request holds: everything so far, only what is new, or all of it once, at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output must look like; exactly one of the first five.

    json: a JSON schema, as text or as an object. regex: matched by the whole output. choice: one of these strings.
    grammar: context-free, in the syntax of Lark or GBNF. json_object: any JSON object. disable_any_whitespace: JSON
    without spaces and line breaks. disable_additional_properties: JSON objects have only the properties of the schema.
    whitespace_pattern: regex of the whitespace that JSON may have.
    """

    json: str | dict[str, Any] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # a list is taken too
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        flag = (type(None), bool)
        text = (type(None), str)
        checks = (
            ("json", isinstance(self.json, (*text, dict)), "give a JSON schema, as text or as an object"),
            ("regex", isinstance(self.regex, text), "give a regular expression"),
            ("choice", self.choice is None or (_is_strings(self.choice) and self.choice), "give a list of strings"),
            ("grammar", isinstance(self.grammar, text), "give a grammar as text"),
            ("json_object", isinstance(self.json_object, flag), "give True or leave it out"),
            ("disable_any_whitespace", isinstance(self.disable_any_whitespace, bool), "give True or False"),
            (
                "disable_additional_properties",
                isinstance(self.disable_additional_properties, bool),
                "give True or False",
            ),
            ("whitespace_pattern", isinstance(self.whitespace_pattern, text), "give a regular expression"),
        )
        _raise(
            [f"structured_outputs.{name} is {getattr(self, name)!r:.80}: {way}" for name, ok, way in checks if not ok]
        )
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(given) or 'no constraint'}: give exactly one of "
                f"{', '.join(_CONSTRAINTS)}"
            )

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> StructuredOutputsParams:
        """From a request's object; None means not given. Raises ConfigError naming a field that there is not."""
        known = {f.name for f in dataclasses.fields(StructuredOutputsParams)}
        given = {name: value for name, value in fields.items() if value is not None}
        _raise(
            [
                f"structured_outputs.{n:.80} is {v!r:.80}: not supported; leave it out"
                for n, v in given.items()
                if n not in known
            ]
        )
        return StructuredOutputsParams(**given)


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. Raises ConfigError for values that make no sense, all of them at once.

    n: completions. presence_penalty, frequency_penalty: taken off the logits of tokens that the output has, once or for
    each time. repetition_penalty: divides the positive and multiplies the negative logits of tokens that prompt or
    output have. temperature: 0 takes the most likely token. top_p: keep the most likely tokens of this total
    probability. top_k: 0 (or -1) keeps all. min_p: keep tokens of at least this share of the likeliest one's.
    seed: the same seed gives the same tokens; None (or -1) differs each time; completion i of n draws with seed + i.
    stop: strings that end the output, not part of it unless include_stop_str_in_output. stop_token_ids: tokens that
    end it. ignore_eos: go on behind the end-of-sequence token. max_tokens: None is up to the end of the context.
    min_tokens: nothing of the above ends the output before these. logprobs, prompt_logprobs: so many of the likeliest
    tokens at each position, and the token itself; -1 is the whole vocabulary. detokenize: False gives token ids only.
    skip_special_tokens: leave them out of the text. spaces_between_special_tokens: where the decoder puts spaces.
    output_kind: what each output holds. structured_outputs: what the output must look like. logit_bias: added to these
    tokens' logits, clamped to -100 ... 100. allowed_token_ids: no other token is sampled. bad_words: never appear.
    skip_reading_prefix_cache: compute the prompt anew; None does where prompt_logprobs need it. extra_args: for your
    own logits processors.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()  # a string or a list are taken too, here and below
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name, value in self._normal():
            object.__setattr__(self, name, value)
        _raise(self._problems() or self._conflicts())

    def _normal(self) -> Iterable[tuple[str, Any]]:
        """The fields that may be written in several ways, in the one way that is stored."""
        yield "stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop)
        yield "stop_token_ids", _tuple(self.stop_token_ids)
        yield "bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else _tuple(self.bad_words)
        if self.allowed_token_ids is not None:
            yield "allowed_token_ids", _tuple(self.allowed_token_ids)
        if self.seed == -1:
            yield "seed", None
        if self.top_k == -1:
            yield "top_k", 0
        for name in ("logprobs", "prompt_logprobs"):  # a chat request says True and False
            if isinstance(value := getattr(self, name), bool):
                yield name, 1 if value else None
        if isinstance(self.structured_outputs, Mapping):
            yield "structured_outputs", StructuredOutputsParams.from_fields(self.structured_outputs)
        for name in _NUMBERS:
            value = getattr(self, name)
            if _is_number(value) and abs(value) >= 2**63:  # as an integer it could not be sent to a core
                yield name, float(value)
        if isinstance(self.logit_bias, Mapping):
            yield "logit_bias", {_token(k): _clamped(v) for k, v in self.logit_bias.items()} or None

    def _problems(self) -> list[str]:
        max_tokens, seed, bias = self.max_tokens, self.seed, self.logit_bias
        penalty, top = "give a number from -2 to 2", "give a number from 0, or -1 for the whole vocabulary"
        bias_ok = bias is None or (
            isinstance(bias, dict) and all(_is_int(k) and k >= 0 and _is_number(v) for k, v in bias.items())
        )
        structured_ok = self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams)
        checks = (
            ("n", _is_int(self.n) and 1 <= self.n <= MAX_N, f"give a whole number from 1 to {MAX_N}"),
            ("presence_penalty", _is_number(self.presence_penalty) and -2 <= self.presence_penalty <= 2, penalty),
            ("frequency_penalty", _is_number(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2, penalty),
            ("repetition_penalty", _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
             "give a number above 0"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "give a number from 0"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "give a number above 0, up to 1"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "give a whole number from 1, or 0 to keep all tokens"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "give a number from 0 to 1"),
            ("seed", seed is None or _is_int(seed), "give a 64-bit integer or None"),
            ("stop", _is_strings(self.stop), "give strings that are not empty"),
            ("stop_token_ids", _is_ids(self.stop_token_ids), "give token ids"),
            ("max_tokens", max_tokens is None or (_is_int(max_tokens) and max_tokens >= 1), "give a number from 1"),
            ("min_tokens", _is_int(self.min_tokens) and self.min_tokens >= 0, "give a number from 0"),
            ("logprobs", _is_count(self.logprobs), top),
            ("prompt_logprobs", _is_count(self.prompt_logprobs), top),
            ("output_kind", isinstance(self.output_kind, RequestOutputKind), "give a RequestOutputKind"),
            ("structured_outputs", structured_ok, "give a StructuredOutputsParams or an object with its fields"),
            ("logit_bias", bias_ok, "give numbers by token id"),
            ("allowed_token_ids", self.allowed_token_ids is None or
             (_is_ids(self.allowed_token_ids) and self.allowed_token_ids), "give at least one token id"),
            ("bad_words", _is_strings(self.bad_words), "give strings that are not empty"),
            ("skip_reading_prefix_cache", isinstance(self.skip_reading_prefix_cache, (bool, type(None))),
             "give True or False"),
            ("extra_args", self.extra_args is None or isinstance(self.extra_args, dict), "give an object"),
            *((name, isinstance(getattr(self, name), bool), "give True or False") for name in _SWITCHES),
        )  # fmt: skip
        return [f"{name} is {getattr(self, name)!r:.80}: {remedy}" for name, ok, remedy in checks if not ok]

    def _conflicts(self) -> list[str]:
        """What is wrong between fields that are each right."""
        checks = (
            (self.n > 1 and self.temperature == 0,
             f"n is {self.n}: with temperature 0 all of them are the same; give n=1 or a temperature"),
            (self.max_tokens is not None and self.min_tokens > self.max_tokens,
             f"min_tokens is {self.min_tokens}: give at most max_tokens, which is {self.max_tokens}"),
            (bool(self.stop) and not self.detokenize,
             f"stop is {self.stop!r:.80}: with detokenize=False there is no text to find it in; give stop_token_ids"),
        )  # fmt: skip
        return [message for wrong, message in checks if wrong]

    @staticmethod
    def from_fields(fields: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """From a request's fields; None means not given, then ``defaults`` hold.

        Fields without support are refused by name, never ignored, unless their value changes nothing.
        """
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        given = {name: value for name, value in fields.items() if value is not None}
        _raise(
            [
                f"{name:.80} is {value!r:.80}: not supported; leave it out"
                for name, value in given.items()
                if name not in known and not _changes_nothing(name, value)
            ]
        )
        return dataclasses.replace(
            defaults or SamplingParams(), **{name: value for name, value in given.items() if name in known}
        )

    @staticmethod
    def from_generation_config(config: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """The defaults a checkpoint's ``generation_config.json`` gives; one that says not to sample means greedy. base:
        for what it leaves open."""
        greedy = {"temperature": 0.0} if config.get("do_sample") is False else {}
        fields = greedy | {ours: config[theirs] for theirs, ours in _FROM_GENERATION_CONFIG.items() if theirs in config}
        try:
            return SamplingParams.from_fields(fields, base)
        except ConfigError as e:
            raise ConfigError(f"generation_config.json: {e}, or give the sampling parameters yourself") from e

    @staticmethod
    def from_checkpoint(folder: Path, base: SamplingParams | None = None) -> SamplingParams:
        """The defaults of a checkpoint folder, ``base`` where it has none. Raises ConfigError when its
        ``generation_config.json`` is damaged."""
        file = folder / "generation_config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except ValueError as damage:
            raise ConfigError(f"{file}: damaged ({damage}); download it again") from damage
        if not isinstance(config, dict):
            raise ConfigError(f"{file}: damaged (no JSON object); download it again")
        return SamplingParams.from_generation_config(config, base)


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search. beam_width: sequences kept. max_tokens: of output. ignore_eos: go on behind the end-of-sequence
    token. temperature: as for sampling; it does not change the log-probabilities that beams are ranked by.
    length_penalty: a sequence scores its log-probability / length ** length_penalty. include_stop_str_in_output: keep
    the end-of-sequence token in the text."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("beam_width", _is_int(self.beam_width) and self.beam_width >= 1, "give a number from 1"),
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "give a number from 1"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "give True or False"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "give a number from 0"),
            ("length_penalty", _is_number(self.length_penalty), "give a number"),
            ("include_stop_str_in_output", isinstance(self.include_stop_str_in_output, bool), "give True or False"),
        )
        _raise([f"{name} is {getattr(self, name)!r:.80}: {remedy}" for name, ok, remedy in checks if not ok])


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems[:_TOLD]))


def _changes_nothing(name: str, value: object) -> bool:
    """Of a field without support. 0 asks for something where False does not, so types count."""
    neutral = _NEUTRAL.get(name)
    return name in _NEUTRAL and value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else () if value is None else (value,)


def _token(key: Any) -> Any:
    """A token id; JSON has only strings as keys."""
    return int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,18}", key) else key


def _clamped(bias: Any) -> Any:
    number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and bias == bias
    return min(100.0, max(-100.0, bias)) if number else bias


def _is_int(value: object) -> bool:
    """Of 64 bits; larger ones do not get to a core."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_count(value: int | None) -> bool:
    return value is None or (_is_int(value) and value >= -1)


def _is_ids(values: tuple[int, ...]) -> bool:
    return all(_is_int(i) and i >= 0 for i in values)


def _is_strings(values: Iterable[object]) -> bool:
    return isinstance(values, tuple) and all(isinstance(s, str) and s for s in values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
