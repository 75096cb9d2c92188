"""How a request is sampled and when it ends: `SamplingParams` and `BeamSearchParams`, with vLLM's names, meanings and
defaults."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from graphllm.config.errors import ConfigError
from graphllm.config.fields import read
from graphllm.config.parameter import (
    IDS,
    MAPPING,
    STRINGS,
    SWITCH,
    Check,
    Column,
    columns,
    documented,
    instance,
    is_biases,
    is_ids,
    is_number,
    normalize,
    number,
    optional,
    parameter,
    raise_all,
    whole,
)
from graphllm.config.requests.structured_outputs import StructuredOutputsParams
from graphllm.config.vllm.names import SAMPLING_NAMES, as_settings

T = TypeVar("T")
MAX_LOGPROB_IDS = 128
MAX_N = 16384  # completions of one request; more is a mistake, and each costs the front memory before it runs

_COUNT = whole("give a number from 0 to 1024", ge=0, le=1024)
_FROM_GENERATION_CONFIG = {"max_new_tokens": "max_tokens"} | {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
}


@documented
@dataclass(frozen=True)
class RepetitionDetectionParams:
    """When an output counts as repeating itself, which ends it with finish_reason "repetition": the same pattern of
    tokens stands ``min_count`` times at its end. Raises ConfigError."""

    max_pattern_size: int = parameter(0, _COUNT, help="Tokens of a pattern at most; 0 looks for none.")
    min_pattern_size: int = parameter(0, _COUNT, help="Tokens of a pattern at least; 0 is 1.")
    min_count: int = parameter(0, _COUNT, help="How often it stands there, from 2.")

    def __post_init__(self) -> None:
        normalize(self, "repetition_detection.")
        if self.min_pattern_size > self.max_pattern_size:
            raise ConfigError(
                f"repetition_detection.min_pattern_size is {self.min_pattern_size}: give at most max_pattern_size, "
                f"which is {self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ConfigError(f"repetition_detection.min_count is {self.min_count}: give a number from 2")

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> RepetitionDetectionParams:
        """From a request's object. Raises ConfigError naming a field that there is not."""
        known = {f.name for f in dataclasses.fields(RepetitionDetectionParams)}
        raise_all(
            f"repetition_detection.{name!s:.80} is {value!r:.80}: not supported; leave it out"
            for name, value in fields.items()
            if name not in known
        )
        return RepetitionDetectionParams(**fields)

    def found_in(self, tokens: Sequence[int]) -> bool:
        """Whether these end with a pattern that repeats."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            length = size * self.min_count
            if length > len(tokens):
                break
            if all(tokens[-i] == tokens[-i - size] for i in range(1, length - size + 1)):
                return True
        return False


class RequestOutputKind(enum.Enum):
    """What each output of a request holds: everything so far, only what is new, or all of it once, at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else () if value is None else (value,)


def _tuple_or_none(value: Any) -> Any:
    return None if value is None else _tuple(value)


def _sendable(value: Any) -> Any:
    """A number; as an integer of more than 64 bits it could not be sent to a core."""
    return float(value) if is_number(value) and abs(value) >= 2**63 else value


def _count(value: Any) -> Any:
    """Of log-probabilities; a chat request says True and False."""
    return (1 if value else None) if isinstance(value, bool) else value


def _structured(value: Any) -> Any:
    return StructuredOutputsParams.from_fields(value) if isinstance(value, Mapping) else value


def _repetition(value: Any) -> Any:
    return RepetitionDetectionParams.from_fields(value) if isinstance(value, Mapping) else value


def _biases(value: Any) -> Any:
    return {_token(k): _clamped(v) for k, v in value.items()} or None if isinstance(value, Mapping) else value


def _token(key: Any) -> Any:
    """A token id; JSON has only strings as keys."""
    return int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,18}", key) else key


def _clamped(bias: Any) -> Any:
    number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and bias == bias
    return min(100.0, max(-100.0, bias)) if number else bias


_PENALTY = number("give a number from -2 to 2", ge=-2, le=2)
_TOP = optional(whole("give a number from 0, or -1 for the whole vocabulary", ge=-1))


def _with_vllm_names(params: type[T]) -> type[T]:
    """A decorator: a dataclass takes vLLM's further names, as `SAMPLING_NAMES` says."""
    init: Any = params.__init__
    defaults = {f.name: f.default for f in dataclasses.fields(cast(Any, params))}

    @functools.wraps(init)
    def accept(self: Any, *values: Any, **given: Any) -> None:
        if not given.keys() <= defaults.keys():
            given = as_settings(given, defaults, SAMPLING_NAMES)
        init(self, *values, **given)

    params.__init__ = accept  # type: ignore[method-assign]
    return params


@_with_vllm_names
@documented
@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. Raises ConfigError for values that make no sense, all of them at once."""

    n: int = parameter(
        1, whole(f"give a whole number from 1 to {MAX_N}", ge=1, le=MAX_N), help="Completions of each prompt."
    )
    presence_penalty: float = parameter(
        0.0, _PENALTY, normal=_sendable, column=("float32", 0.0),
        help="Taken off the logits of tokens that the output has.",
    )  # fmt: skip
    frequency_penalty: float = parameter(
        0.0, _PENALTY, normal=_sendable, column=("float32", 0.0),
        help="Taken off the logits of tokens for each time that the output has them.",
    )  # fmt: skip
    repetition_penalty: float = parameter(
        1.0, number("give a number above 0", gt=0), normal=_sendable, column=("float32", 1.0),
        help="Divides the positive and multiplies the negative logits of tokens that prompt or output have.",
    )  # fmt: skip
    temperature: float = parameter(
        1.0, number("give a number from 0", ge=0), normal=_sendable, column=("float32", 0.0),
        help="0 takes the most likely token.",
    )  # fmt: skip
    top_p: float = parameter(
        1.0, number("give a number above 0, up to 1", gt=0, le=1), normal=_sendable, column=("float32", 1.0),
        help="Keep the most likely tokens of this total probability.",
    )  # fmt: skip
    top_k: int = parameter(
        0, whole("give a whole number from 1, or 0 to keep all tokens", ge=0), bounds={"ge": -1}, column=("int32", 0),
        normal=lambda value: 0 if value == -1 else value, help="Keep the k most likely tokens; 0 and -1 keep all.",
    )  # fmt: skip
    min_p: float = parameter(
        0.0, number("give a number from 0 to 1", ge=0, le=1), normal=_sendable, column=("float32", 0.0),
        help="Keep tokens of at least this share of the likeliest one's probability.",
    )  # fmt: skip
    seed: int | None = parameter(
        None, optional(whole("give a 64-bit integer or None")), bounds={"ge": -(2**63), "le": 2**63 - 1},
        normal=lambda value: None if value == -1 else value, column=("int64", 0, "request"),
        help="The same seed gives the same tokens; None and -1 differ each time. Completion i of n has seed + i.",
    )  # fmt: skip
    stop: tuple[str, ...] = parameter(
        (), STRINGS, normal=_texts, body=str | list[str],
        help="Strings that end the output, not part of it unless include_stop_str_in_output; special tokens, too.",
    )  # fmt: skip
    stop_token_ids: tuple[int, ...] = parameter(
        (), IDS, normal=_tuple, body=list[int], help="Tokens that end the output."
    )
    ignore_eos: bool = parameter(False, SWITCH, help="Go on after the end-of-sequence token.")
    max_tokens: int | None = parameter(
        16, optional(whole("give a number from 1", ge=1)),
        help="Tokens of output at most; None is up to the end of the context.",
    )  # fmt: skip
    min_tokens: int = parameter(0, whole("give a number from 0", ge=0), help="Nothing ends the output before these.")
    logprobs: int | None = parameter(
        None, _TOP, normal=_count, bounds={"ge": -1},
        help="So many of the likeliest tokens at each position, and the token itself; -1 is the whole vocabulary.",
    )  # fmt: skip
    prompt_logprobs: int | None = parameter(
        None, _TOP, normal=_count, bounds={"ge": -1}, cli=False, help="The same for each position of the prompt."
    )
    logprob_token_ids: tuple[int, ...] | None = parameter(
        None, optional(Check(lambda value: is_ids(value) and 0 < len(value) <= MAX_LOGPROB_IDS,
                             f"give 1 to {MAX_LOGPROB_IDS} token ids")),
        normal=_tuple_or_none, body=list[int], cli=False,
        help="Token ids to give log-probabilities of at each position of the output, in addition to logprobs.",
    )  # fmt: skip
    thinking_token_budget: int | None = parameter(
        None, optional(whole("give a number from 0", ge=0)),
        help="Tokens of thinking at most; then `</think>` follows. Of models that think in these tags. With it, "
        "structured_outputs hold after the thinking that the prompt begins; without it, from the first token on.",
    )  # fmt: skip
    detokenize: bool = parameter(True, SWITCH, body=False, cli=False, help="False gives token ids only.")
    skip_special_tokens: bool = parameter(True, SWITCH, help="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = parameter(True, SWITCH, help="Where the decoder puts spaces.")
    include_stop_str_in_output: bool = parameter(False, SWITCH, help="Keep what ended the output in the text.")
    output_kind: RequestOutputKind = parameter(
        RequestOutputKind.CUMULATIVE, instance(RequestOutputKind, "give a RequestOutputKind"), body=False, cli=False,
        help="What each output holds: all so far, what is new, or all of it once.",
    )  # fmt: skip
    structured_outputs: StructuredOutputsParams | None = parameter(
        None,
        optional(instance(StructuredOutputsParams, "give a StructuredOutputsParams or an object with its fields")),
        normal=_structured, body=dict[str, Any], cli=False,
        help="What the output must look like: one of json (a schema), regex, choice, grammar, json_object.",
    )  # fmt: skip
    logit_bias: dict[int, float] | None = parameter(
        None, optional(Check(is_biases, "give numbers by token id")), normal=_biases, body=dict[str, float], cli=False,
        hashed=False, help="Added to these tokens' logits, clamped to -100 ... 100.",
    )  # fmt: skip
    allowed_token_ids: tuple[int, ...] | None = parameter(
        None, optional(Check(lambda value: is_ids(value) and len(value) > 0, "give at least one token id")),
        normal=_tuple_or_none, body=list[int], help="No other token is sampled.",
    )  # fmt: skip
    bad_words: tuple[str, ...] = parameter(
        (), STRINGS, normal=_texts, body=list[str], help="Texts that the output never has, also within words."
    )
    repetition_detection: RepetitionDetectionParams | None = parameter(
        None,
        optional(instance(RepetitionDetectionParams, "give a RepetitionDetectionParams or an object with its fields")),
        normal=_repetition, body=dict[str, int], cli=False,
        help="End an output that repeats itself: max_pattern_size, min_pattern_size, min_count.",
    )  # fmt: skip
    skip_reading_prefix_cache: bool | None = parameter(
        None, optional(SWITCH), body=False, cli=False,
        help="Compute the prompt anew; None does where prompt_logprobs need it.",
    )  # fmt: skip
    extra_args: dict[str, Any] | None = parameter(
        None, MAPPING, body=False, cli=False, hashed=False, help="For your own logits processors."
    )  # fmt: skip

    def __post_init__(self) -> None:
        normalize(self)
        raise_all(self._conflicts())
        if self.logprob_token_ids is not None and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

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
        known = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
        given = {name: value for name, value in fields.items() if value is not None}
        return dataclasses.replace(defaults or SamplingParams(), **as_settings(given, known, SAMPLING_NAMES))

    @staticmethod
    def from_generation_config(
        config: Mapping[str, Any], base: SamplingParams | None = None, source: str = "generation_config.json"
    ) -> SamplingParams:
        """The defaults a checkpoint's ``generation_config.json`` gives; one that says not to sample means greedy. base:
        for what it leaves open. source: where it comes from, for people."""
        sampled = read(config, "do_sample", SWITCH, True, True, source)
        greedy = {} if sampled else {"temperature": 0.0}
        fields = greedy | {ours: config[theirs] for theirs, ours in _FROM_GENERATION_CONFIG.items() if theirs in config}
        try:
            return SamplingParams.from_fields(fields, base)
        except ConfigError as e:
            raise ConfigError(f"{source}: {e}, or give the sampling parameters yourself") from e

    @staticmethod
    def from_overrides(overrides: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """The same of a user's ``override_generation_config``; each of its fields must mean something."""
        known = ["do_sample", *_FROM_GENERATION_CONFIG]
        raise_all(
            f"override_generation_config.{name!s:.80} is {value!r:.80}: it has no effect; give {', '.join(known)}"
            for name, value in overrides.items()
            if name not in known
        )
        return SamplingParams.from_generation_config(overrides, base, "override_generation_config")

    @staticmethod
    def of_model(
        generation: Mapping[str, Any], overrides: Mapping[str, Any], base: SamplingParams | None = None
    ) -> SamplingParams:
        """The defaults of a model: a user's ``override_generation_config``, then its ``generation_config.json``, then
        ``base``."""
        return SamplingParams.from_overrides(overrides, SamplingParams.from_generation_config(generation, base))


@documented
@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search. Raises ConfigError for values that make no sense, all of them at once."""

    beam_width: int = parameter(dataclasses.MISSING, whole("give a number from 1", ge=1), help="Sequences kept.")
    max_tokens: int = parameter(dataclasses.MISSING, whole("give a number from 1", ge=1), help="Tokens of output.")
    ignore_eos: bool = parameter(False, SWITCH, help="Go on after the end-of-sequence token.")
    temperature: float = parameter(
        0.0, number("give a number from 0", ge=0),
        help="As for sampling; it does not change the log-probabilities that beams are ranked by.",
    )  # fmt: skip
    length_penalty: float = parameter(
        1.0, number("give a number"), help="A sequence scores its log-probability / length ** length_penalty."
    )
    include_stop_str_in_output: bool = parameter(False, SWITCH, help="Keep the end-of-sequence token in the text.")

    def __post_init__(self) -> None:
        normalize(self)


def sampling_columns() -> tuple[Column, ...]:
    """The sampling parameters that reach the device, one entry for each sampled row."""
    return columns(SamplingParams)
