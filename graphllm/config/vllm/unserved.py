"""Routes of vLLM's that are not served, with why, and what to do; one line each."""

from __future__ import annotations

from collections.abc import Mapping

_ASKING = "ask by /v1/chat/completions, or score pairs by /score of a model that gives vectors"
_WEIGHTS = "the weights of a running server never change; compile the new ones and start another server"
_PAUSE = "use /sleep?level=0, /wake_up and /is_sleeping of a server with --enable-sleep-mode"
_SOUND = "models here read text only"
_LORA = "start the server with --enable-lora and --lora-dir, the folder of the adapters that may be loaded"
_RENDER = "use /tokenize with messages, or return_token_ids and return_prompt_text in a request"
_COHERE = "use /v1/chat/completions, /v1/responses or /v1/messages"
_ONE = "one server has one engine on one device; start one server for each device, with a proxy in front"
_FAULT = "see /health, and --restart-engine"

UNSERVED: Mapping[str, str] = {
    **dict.fromkeys(("/generative_scoring", "/v1/systemone", "/v1/decisions"), _ASKING),
    **dict.fromkeys(
        ("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
         "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
         "/weight_info", "/weight_checker", "/get_world_size"), _WEIGHTS),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), _PAUSE),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime", "/reset_mm_cache",
                     "/reset_encoder_cache"), _SOUND),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _LORA),
    **dict.fromkeys(
        ("/v1/chat/completions/derender", "/v1/completions/derender", "/v1/chat/completions/render",
         "/v1/messages/render", "/v1/completions/render", "/v1/responses/render"), _RENDER),
    **dict.fromkeys(("/inference/v1/generate",), "send token ids to /v1/completions, with return_token_ids"),
    **dict.fromkeys(("/inference/v1/abort_requests",), "use /abort_requests"),
    **dict.fromkeys(("/cohere/v2/chat", "/cohere/v2/chat/render"), _COHERE),
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _ONE),
    "/collective_rpc": "a server runs nobody's functions; a script does, by LLM.collective_rpc",
    **dict.fromkeys(("/fault_tolerance/apply", "/fault_tolerance/status"), _FAULT),
    **dict.fromkeys(("/readyz",), "use /ready, or /health/ready"),
}  # fmt: skip
