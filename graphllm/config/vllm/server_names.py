"""vLLM's flags for its server that are no options of `graphllm serve`, as data; see `graphllm.config.vllm.names`. A
flag that becomes an option leaves this table."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.config.vllm.names import ForeignName, fixed, hints

_TEXT = "models here read text only; leave it out"
_OWN_HTTP = "the limits of HTTP are fixed: 64 KiB and 256 headers (docs/serving.md); leave it out"
_NO_CODE = "no code from outside runs in the server; leave it out, and put a proxy before it"
_ALWAYS = "that is always done"

FRONTEND_NAMES: Mapping[str, ForeignName] = {
    # Done anyway.
    **hints(
        _ALWAYS, enable_auto_tool_choice=True, enable_prompt_tokens_details=True, enable_server_load_tracking=True,
        enable_request_id_headers=True, exclude_tools_when_tool_choice_none=True, enable_offline_docs=True,
    ),
    **hints("prompts and answers are never logged", max_log_len=(), enable_log_outputs=False, enable_log_deltas=True),
    **hints("an error of ours is always logged with its traceback", log_error_stack=False),
    **hints("the answers' figures are at /metrics", enable_per_request_metrics=False),
    **hints("/tokenizer_info is there for an --admin-api-key", enable_tokenizer_info_endpoint=False),
    **hints("files are read at the start; send SIGTERM and start again with new ones", enable_ssl_refresh=False),
    # Of what there is not.
    **fixed(_TEXT, trust_request_mm_kwargs=False, enable_flash_late_interaction=True),
    **fixed("the chat template itself shows it; use auto", chat_template_content_format=("auto", "string", "openai")),
    **fixed("give tool_call_parser one of auto, hermes, llama3, mistral, none", tool_parser_plugin=""),
    **fixed("arguments of calls that must be made always fit their schema; leave it out", tool_strict_level=()),
    **fixed("this server runs no tools; give tools in requests", tool_server=()),
    **fixed("give reasoning_effort in requests, or --default-chat-template-kwargs", reasoning_effort_map=({},),
            anthropic_disabled_thinking_effort="auto"),
    **fixed("Cohere's API is not served; leave it out", cohere_is_reasoning_model=True, cohere_format="cmd4"),
    **fixed("a server speaks text; send token ids to /v1/completions, and return_token_ids", tokens_only=False),
    **fixed("the number of engine cores is fixed while they run; see data_parallel_size", enable_scale_out=False),
    **fixed("answers have no system_fingerprint; /server_info says what is served",
            fingerprint_mode=("full", "none"), fingerprint_value=()),
    **fixed("gRPC is not served; use --port", grpc_port=()),
    **fixed(_NO_CODE, middleware=([],)),
    **fixed("ciphers are OpenSSL's defaults; leave it out", ssl_ciphers=()),
    **fixed(_OWN_HTTP, h11_max_incomplete_event_size=(65536, 4194304), h11_max_header_count=256),
}  # fmt: skip
