"""Fields of requests that are not served as they stand, one line each: what is ignored and why that harms nobody, what
is refused and what to do instead, and vLLM's older names. They hold for the bodies of all APIs.

What stands nowhere, neither here nor with an API, is refused by name, so no field is ignored that nobody has judged.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from graphllm.config import ConfigError

_log = logging.getLogger(__name__)
_logged: set[str] = set()  # names that the log has had


class Refused(NamedTuple):
    """neutral: values that ask for nothing; null always does. remedy: what to do about the others."""

    neutral: tuple[Any, ...]
    remedy: str


_BILLING = "about billing and routing, not about the output"
_CACHING = "all prefixes are cached, for everybody with the same cache_salt"
_KEEPING = "nothing of a chat is kept"

IGNORED: Mapping[str, str] = {
    "context_management": "no context is edited; what does not fit is refused",
    "diagnostics": "about the client's own reports",
    "max_tool_calls": "this server calls no tools itself",
    "metadata": "a label of the client's",
    "prediction": "only makes others faster",
    "prompt_cache_key": _CACHING,
    "prompt_cache_options": _CACHING,
    "prompt_cache_retention": _CACHING,
    "safety_identifier": _BILLING,
    "service_tier": _BILLING,
    "session_id": _BILLING,
    "store": _KEEPING,
    "user": _BILLING,
    "verbosity": "models here have no such control; the prompt can ask for it",
}

_NO_MEDIA = "models here read and write text only; leave it out"
_TRANSFER = "only blocks of the cache move between servers; leave it out"
_EXPERTS = "the choice of experts is not reported; leave it out"
_WATERMARK = "answers carry no watermark; leave it out"
_TOOLS = "give tools and tool_choice, the newer names"

REFUSED: Mapping[str, Refused] = {
    "audio": Refused((), _NO_MEDIA),
    "best_of": Refused((1,), "give n, and choose among the choices"),
    "conversation": Refused((), "give previous_response_id"),
    "container": Refused((), "this server runs no code; leave it out"),
    "ec_transfer_params": Refused(({},), _TRANSFER),
    "enable_response_messages": Refused((False,), "ask for return_token_ids in a chat"),
    "function_call": Refused(("none",), _TOOLS),
    "functions": Refused(([],), _TOOLS),
    "kv_transfer_params": Refused(({},), "give it to /v1/chat/completions or /v1/completions"),
    "mcp_servers": Refused(([],), "this server runs no tools; give tools of your own"),
    "media_io_kwargs": Refused(({},), _NO_MEDIA),
    "mm_payload": Refused(("tensors",), _NO_MEDIA),
    "mm_processor_kwargs": Refused(({},), _NO_MEDIA),
    "modalities": Refused((["text"],), _NO_MEDIA),
    "previous_input_messages": Refused(([],), "give previous_response_id, or the whole input"),
    "prompt_embeds": Refused(([],), "give text or token ids as prompt"),
    "return_mm_kwargs": Refused((False,), _NO_MEDIA),
    "return_token_offsets": Refused((False,), "only /tokenize tells of tokens; leave it out"),
    "return_weight_versions": Refused((False,), "weights never change here; leave it out"),
    "routed_experts_prompt_start": Refused((0,), _EXPERTS),
    "watermarking": Refused((False,), _WATERMARK),
    "web_search_options": Refused((), "this server fetches nothing; give tools of your own"),
}

BACKEND = "guided_decoding_backend"
# Older names of structured_outputs' fields.
GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_backend": "backend",
}


def judged(body: Mapping[str, Any], own: Container[str] = (), strict: bool = False) -> dict[str, Any]:
    """The fields of a body that are given, without those that are ignored or ask for nothing.

    own: names that this API has a meaning for. strict: nothing is ignored. Raises ConfigError for what is refused.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name not in own]:
        if name in IGNORED:
            if strict:
                raise ConfigError(
                    f"{name} is {given[name]!r:.80}: not used here ({IGNORED[name]}); leave it out, or start without "
                    "--strict-fields"
                )
            tell_once(name, f"{name} of requests is ignored: {IGNORED[name]}")
            del given[name]
        elif name in REFUSED:
            value, refused = given.pop(name), REFUSED[name]
            if not any(value == neutral and type(value) is type(neutral) for neutral in refused.neutral):
                raise ConfigError(f"{name} is {value!r:.80}: not supported; {refused.remedy}")
    return given


def unguided(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM's older fields of structured outputs under their newer name; they are taken out. A backend without
    a constraint stays "guided_decoding_backend"; a chat's response_format or tools may make a constraint for it."""
    found = {}
    only_backend = not any(name in given for name in GUIDED if name != BACKEND) and "structured_outputs" not in given
    for name in [name for name in GUIDED if name in given and not (only_backend and name == BACKEND)]:
        tell_once(name, f"{name} of requests is deprecated: give structured_outputs.{GUIDED[name]}")
        found[GUIDED[name]] = given.pop(name)
    if not found:
        return {}
    if "structured_outputs" in given:
        older = next(old for old, new in GUIDED.items() if new in found)
        raise ConfigError(f"{older} and structured_outputs are both given; leave out {older}")
    return {"structured_outputs": found}


def tell_once(name: str, line: str) -> None:
    """To the log, once for each name in the life of a process."""
    if name not in _logged:
        _logged.add(name)
        _log.info("%s", line)
