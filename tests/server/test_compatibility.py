"""Every name of vLLM's HTTP surface works, is ignored because that harms nobody, or is refused with a remedy; and
docs/compatibility.md says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphllm.chat.call import CHAT, COMPLETIONS, Call, parse_call
from graphllm.cli.app import command_line
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.server import ChatConfig
from graphllm.config.vllm.names import VLLM_NAMES, as_settings
from graphllm.config.vllm.server_names import FRONTEND_NAMES
from graphllm.engine.metrics.metric_families import FAMILIES, NOT_MEASURED
from graphllm.server.apis.anthropic import requests as anthropic
from graphllm.server.apis.responses import requests as responses
from graphllm.server.compatibility import APIS, state_of

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": "hello"},
    "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": 9},
}
# A value for each field that says something; beside those that other APIs read in another way.
VALUES: dict[str, Any] = {
    "messages": HELLO, "model": "m", "frequency_penalty": 0.5, "logit_bias": {"3": 1.0}, "logprobs": True,
    "top_logprobs": 2, "max_tokens": 5, "max_completion_tokens": 5, "n": 2, "presence_penalty": 0.5,
    "response_format": {"type": "json_object"}, "seed": 3, "stop": ["x"], "stream": True,
    "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.5, "tools": [TOOL], "tool_choice": "none",
    "reasoning_effort": "low", "thinking_token_budget": 4, "include_reasoning": False, "parallel_tool_calls": False,
    "use_beam_search": True, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "length_penalty": 0.5,
    "stop_token_ids": [1], "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "truncate_prompt_tokens": 3,
    "truncation": "auto",
    "truncation_side": "right", "prompt_logprobs": 1, "logprob_token_ids": [1], "allowed_token_ids": [1],
    "bad_words": ["x"], "echo": True, "add_generation_prompt": False, "continue_final_message": True,
    "add_special_tokens": True, "documents": [{"text": "x"}], "chat_template": "x", "chat_template_kwargs": {"a": 1},
    "structured_outputs": {"regex": "a"}, "priority": 3, "request_id": "r", "return_tokens_as_token_ids": True,
    "return_token_ids": True, "return_prompt_text": True, "cache_salt": "s", "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"do_remote_decode": True},
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "stream_interval": 3, "prompt": "other",
    "suffix": "x", "background": True, "include": ["reasoning.encrypted_content"], "input": "x", "instructions": "i",
    "max_output_tokens": 5, "metadata": {"a": "b"}, "previous_response_id": "resp_0", "reasoning": {"effort": "low"},
    "service_tier": "auto", "store": True, "text": {"verbosity": "low"}, "user": "u", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "safety_identifier": "s", "output_config": {"effort": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"], "system": "s",
}  # fmt: skip
OTHERS: dict[tuple[str, str], Any] = {
    ("completions", "logprobs"): 2,
    ("responses", "tools"): [{"type": "function", "name": "f", "parameters": {}}],
    ("messages", "tools"): [{"name": "f", "input_schema": {}}],
    ("messages", "tool_choice"): {"type": "auto"},
}
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "length_penalty": {"use_beam_search": True},
}
RESPONSES_NEED = {"top_logprobs": {"include": ["message.output_text.logprobs"]}}


def _surface() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("vllm_http.txt").read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = names = []
        else:
            names += line.split()
    return found


SURFACE = _surface()
FIELDS = [(api, name) for api in APIS for name in SURFACE[api]]


def _call(api: str, body: dict[str, Any], strict: bool = False) -> Call:
    rules = ChatConfig(strict_fields=strict, trust_request_chat_template=True)
    match api:
        case "responses":
            body = responses.to_chat(body, (), strict)
        case "messages":
            body = anthropic.to_chat(body, strict)
    return parse_call(COMPLETIONS if api == "completions" else CHAT, body, SamplingParams(max_tokens=None), rules)


def test_the_surface_is_all_there() -> None:
    assert [len(SURFACE[api]) for api in APIS] == [69, 56, 57, 22]
    assert (len(SURFACE["flags"]), len(SURFACE["metrics"])) == (62, 41)


@pytest.mark.parametrize(("api", "name"), FIELDS)
def test_a_field(api: str, name: str) -> None:
    body, state = BODIES[api], state_of(api, name)
    assert _call(api, {**body, name: None} if name not in body else body) == _call(api, body)
    if state == "ignored":
        value = VALUES.get(name, "anything")
        assert _call(api, {**body, name: value}) == _call(api, body)
        with pytest.raises(ConfigError, match=rf"^{name} is .*--strict-fields"):
            _call(api, {**body, name: value}, strict=True)
    elif state == "refused":
        with pytest.raises(ConfigError, match=rf"^{name} is .*: .*(;|use |give )"):
            _call(api, {**body, name: {"strange": 1}})
    else:
        value = OTHERS.get((api, name), VALUES[name])
        needs = (NEEDS | (RESPONSES_NEED if api == "responses" else {})).get(name, {})
        changed = _call(api, {**body, **needs, name: value}, strict=True)
        assert isinstance(changed, Call)
        if api in ("chat", "completions") and name not in ("documents", "prompt"):  # others are checked by their models
            with pytest.raises((ConfigError, TypeError)):
                _call(api, {**body, **NEEDS.get(name, {}), name: [[object()]]})


def test_flags() -> None:
    command: Any = command_line().commands["serve"]  # type: ignore[attr-defined]
    options = {option.lstrip("-").replace("-", "_") for p in command.params for option in (*p.opts, *p.secondary_opts)}
    for flag in SURFACE["flags"]:
        name = flag.replace("-", "_")
        assert name in options or name in FRONTEND_NAMES or name in VLLM_NAMES, flag
    assert not options & FRONTEND_NAMES.keys()
    for name, entry in FRONTEND_NAMES.items():
        for value in (None, *entry.neutral):
            assert as_settings({name: value}, {}, FRONTEND_NAMES) == {}
        if not entry.hint:
            with pytest.raises(ConfigError, match=rf"^{name} is 'strange': .+"):
                as_settings({name: "strange"}, {}, FRONTEND_NAMES)


def test_metrics() -> None:
    here = {family.alias for family in FAMILIES}
    assert set(SURFACE["metrics"]) <= here | NOT_MEASURED.keys()
    assert not here & NOT_MEASURED.keys()
