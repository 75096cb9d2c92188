"""The settings of a server: `ServerConfig`. The options of `graphllm serve`, their checks and docs/settings.md are
generated from this tree, and its groups are what the parts of the server are given."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphllm.config.errors import ConfigError
from graphllm.config.server.texts import parse_folder, parse_kwargs, parse_root_path, parse_template, parse_words
from graphllm.config.setting import assemble, definitions, parse_bytes, setting

_Level = Literal["debug", "info", "warning", "error"]
_MOST_FRONTS = 64  # more than any engine can feed
_LIST = ("allowed_origins", "allowed_methods", "allowed_headers")  # vLLM's users give a JSON list, or words with commas


@dataclass(frozen=True)
class ListenConfig:
    """Where a server listens, and with which certificate."""

    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 means every address of the machine.")
    port: int = setting(8000, help="Port to listen on; 0 takes a free port.")
    uds: Path | None = setting(None, help="Listen on this Unix socket instead.")
    ssl_certfile: Path | None = setting(None, help="Serve HTTPS with this certificate, a PEM file.")
    ssl_keyfile: Path | None = setting(None, auto="in the same file", help="Private key of --ssl-certfile, a PEM file.")
    ssl_ca_certs: Path | None = setting(None, help="Certificates that sign the clients' certificates, a PEM file.")
    ssl_cert_reqs: int = setting(0, help="Certificates of clients: 0 none, 1 optional, 2 required.")


@dataclass(frozen=True)
class AccessConfig:
    """Who may ask a server for what, how often, and from where; which requests are logged."""

    api_key: tuple[str, ...] = setting(
        (), help="Requests must bring this key; may be repeated. GRAPHLLM_API_KEY adds one."
    )
    admin_api_key: tuple[str, ...] = setting(
        (), help="Key for /server_info, /reset_prefix_cache, /sleep and other paths of the operator; may be repeated."
    )
    allowed_origins: tuple[str, ...] = setting((), help="Web pages of this origin may ask (CORS); may be repeated.")
    allowed_methods: tuple[str, ...] = setting(("*",), help="HTTP methods that these origins may use.")
    allowed_headers: tuple[str, ...] = setting(("*",), help="HTTP headers that these origins may send.")
    allow_credentials: bool = setting(False, help="These origins may send the browser's credentials.")
    rate_limit_token: int | None = setting(
        None, help="Requests that one key, or one address, may send in --rate-limit-interval."
    )
    rate_limit_interval: float = setting(60.0, help="Time in which --rate-limit-token counts, in seconds.")
    root_path: str = setting(
        "", parse=parse_root_path, help="Path of this server at a proxy in front of it, such as /models/chat."
    )
    disable_fastapi_docs: bool = setting(False, help="Serve neither /docs nor /openapi.json.")
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (),
        parse=functools.partial(parse_words, "disable-access-log-for-endpoints"),
        help="Log no line for requests of these paths, separated by commas.",
    )


@dataclass(frozen=True)
class ModelsConfig:
    """The models and adapters that a server has, and their names."""

    served_model_name: tuple[str, ...] = setting((), help="Name of the model in requests; may be repeated.")
    also: tuple[str, ...] = setting(
        (),
        help="Serve one more model, such as one that gives vectors: folder or name, or JSON with model, "
        "served_model_name and its settings; may be repeated.",
    )
    lora_modules: tuple[str, ...] = setting(
        (), help="Serve an adapter, as name=path; requests give the name as their model; may be repeated."
    )
    lora_dir: str | None = setting(
        None, parse=parse_folder, help="Requests may load and unload adapters of this folder (/v1/load_lora_adapter)."
    )


@dataclass(frozen=True)
class ChatConfig:
    """How bodies of requests are read, and how answers are written."""

    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = setting(
        "auto", help="Format of tool calls in replies; auto follows the chat template."
    )
    reasoning_parser: Literal["auto", "think", "none"] = setting(
        "auto", help="Format of reasoning in replies; auto follows the chat template."
    )
    chat_template: str | None = setting(
        None, parse=parse_template, help="Chat template in place of the checkpoint's: a file, or the template itself."
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        written=dict | None,
        parse=parse_kwargs,
        help="Variables of chat templates for requests without any, as JSON.",
    )
    trust_request_chat_template: bool = setting(False, help="Requests may bring a chat template.")
    response_role: str = setting("assistant", help="Role of answers of /v1/chat/completions.")
    strict_fields: bool = setting(
        False, help="Refuse fields of requests that would be ignored, such as user and store."
    )
    return_tokens_as_token_ids: bool = setting(False, help="Write tokens in log-probabilities as token_id:ID.")
    enable_force_include_usage: bool = setting(False, help="End every stream with its usage.")


@dataclass(frozen=True)
class WatchConfig:
    """How a server watches its engine."""

    restart_engine: bool = setting(False, help="Start a broken engine again.")
    step_timeout: float = setting(
        8.0, help="Seconds in which a step must finish a kernel; after them the engine counts as stuck."
    )


@dataclass(frozen=True)
class ServingConfig:
    """The processes that speak HTTP, and their limits."""

    api_server_count: int = setting(
        1, help="Number of processes that speak HTTP for one engine.", ge=1, le=_MOST_FRONTS
    )
    max_body_size: int = setting(
        32 << 20,
        auto="32MiB",
        parse=functools.partial(parse_bytes, "max-body-size"),
        help="Largest body of a request.",
    )
    sse_keep_alive_interval: float = setting(
        15.0, help="Seconds of silence in a stream before a comment is sent; 0 sends none.", ge=0
    )
    shutdown_timeout: float = setting(30.0, help="Seconds that running requests get after SIGTERM.")


@dataclass(frozen=True)
class RanksConfig:
    """One server for each data-parallel rank, and other machines of one engine."""

    headless: bool = setting(
        False, help="Speak no HTTP: lend this machine, --node-rank of --nnodes, to the engine at --master-addr."
    )
    data_parallel_multi_port_external_lb: bool = setting(
        False,
        help="Start one server for each of the data_parallel_size ranks, on --port and the ports after it, for a load "
        "balancer of yours.",
    )
    data_parallel_supervisor_port: int = setting(9256, help="Port of the health endpoint of all ranks.")
    dp_supervisor_probe_interval_s: float = setting(5.0, help="Seconds between two health checks of a rank.")
    dp_supervisor_probe_timeout_s: float = setting(5.0, help="Seconds that a rank has to answer a health check.")
    dp_supervisor_probe_failure_threshold: int = setting(
        3, help="Failed health checks in a row after which a rank counts as unhealthy."
    )


@dataclass(frozen=True)
class ServerLogConfig:
    """The log of a server's processes, on stderr."""

    disable_uvicorn_access_log: bool = setting(False, help="Log no line for each request.")
    uvicorn_log_level: _Level = setting("warning", help="Log level of the HTTP library.")
    log_format: Literal["text", "json"] = setting("text", help="Form of a line in the log.")
    log_level: _Level = setting("info", help="Log level of the server; info has a line for each request.")


@dataclass(frozen=True)
class ServerConfig:
    """Every setting of a server."""

    listen: ListenConfig = ListenConfig()
    access: AccessConfig = AccessConfig()
    models: ModelsConfig = ModelsConfig()
    chat: ChatConfig = ChatConfig()
    watch: WatchConfig = WatchConfig()
    serving: ServingConfig = ServingConfig()
    ranks: RanksConfig = RanksConfig()
    log: ServerLogConfig = ServerLogConfig()

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used."""
        for name, seconds in (
            ("shutdown-timeout", self.serving.shutdown_timeout),
            ("step-timeout", self.watch.step_timeout),
        ):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} is {seconds}: give seconds from 0")
        for option, keys in (("api-key", self.access.api_key), ("admin-api-key", self.access.admin_api_key)):
            if any(not key.strip() for key in keys):
                raise ConfigError(f"{option} is empty: give one of at least one character, or leave it out")
        tokens, interval = self.access.rate_limit_token, self.access.rate_limit_interval
        if tokens is not None and (tokens < 1 or not 0 < interval < math.inf):
            name, value = ("token", tokens) if tokens < 1 else ("interval", interval)
            raise ConfigError(f"rate-limit-{name} is {value}: give a number above 0")


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """A config from settings by name; one that is not given, or None, has its default. Raises ConfigError."""
    values = {}
    for name, d in definitions(ServerConfig).items():
        if (value := given.get(name)) is not None:
            option = name.replace("_", "-")
            value = d._replace(name=option).read(value)
            values[name] = tuple(w for text in value for w in parse_words(option, text)) if name in _LIST else value
    config: ServerConfig = assemble(ServerConfig, values)
    config.check()
    return config
