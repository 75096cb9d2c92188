"""What a router asks of a server for prompts: the bodies of requests, changed so that only the prompt is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphllm.config.vllm.kv_transfer import PARAMS

_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Of what is generated, which is thrown away here. Constraints need not hold for it.
_LEFT_OUT = frozenset({
    "stream", "stream_options", "stream_interval", "n", "min_tokens", "min_completion_tokens", "logprobs",
    "top_logprobs", "stop", "stop_token_ids", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "guided_json_object", "guided_whitespace_pattern", "guided_decoding_backend",
    "return_token_ids", "return_prompt_text", "thinking_token_budget", "repetition_detection",
})  # fmt: skip


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request that has the prompt of a request computed; None where that does not help: for several prompts, for
    prompts whose tokens are scored, and where the client has said who goes on."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    if several or body.get("use_beam_search") or body.get(PARAMS):
        return None
    if body.get("prompt_logprobs") is not None or (body.get("echo") and "prompt" in body):
        return None
    asked = {name: value for name, value in body.items() if name not in _LEFT_OUT}
    asked |= {"max_tokens": 1, "stream": False, PARAMS: dict(_ASKED)}
    if asked.pop("max_completion_tokens", None) is not None:
        asked["max_completion_tokens"] = 1
    if isinstance(asked.get("tool_choice"), dict) or asked.get("tool_choice") == "required":
        asked["tool_choice"] = "auto"  # the prompt is the same, and no call has to be complete
    return asked


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request of a client, with what the server for prompts has said."""
    return dict(body) if params is None else {**body, PARAMS: dict(params)}
