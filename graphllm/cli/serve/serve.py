"""`graphllm serve`: the log of a server, its keys and names; the server itself is `graphllm.server.process.launch`."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from graphllm.cli.build import build_errors
from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.server import ServerConfig
from graphllm.engine.chat_template.conversation import check_template_kwargs
from graphllm.engine.process.spawn import Child
from graphllm.entrypoints.adapters import check_adapters
from graphllm.loading.artifact.model import ResolvedModel, resolve_model
from graphllm.loading.checkpoint.hub import name_of
from graphllm.program.artifact import Artifact
from graphllm.server.process.launch import Opening
from graphllm.server.process.launch import serve as serve_forever
from graphllm.server.process.options import ServerOptions
from graphllm.server.service.adapters import parse_modules
from graphllm.server.supervision.engine_view import SupervisorOptions
from graphllm.server.supervision.logs import start_log

_KEY_VARIABLE = "GRAPHLLM_API_KEY"
_EMBEDDED = "graphllm-embedded"
_ORPHAN_GRACE = 5.0  # seconds


class Also(NamedTuple):
    """A further model. names: in requests."""

    args: EngineArgs
    names: tuple[str, ...]


def serve(server: ServerConfig, args: EngineArgs, children: Sequence[Child], others: Sequence[Child]) -> int:
    """Serve models until a signal; the exit status. children: processes of the first model's engine cores. others: a
    process for each further model. Raises ConfigError for settings that cannot be used."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rank = args.data_parallel_rank
    start_log(server.log, "" if rank is None else f"rank-{rank}")
    if server.ranks.data_parallel_multi_port_external_lb:
        end_with_supervisor()
    check_template_kwargs(server.chat.default_chat_template_kwargs or {}, "default-chat-template-kwargs")
    keys = (*server.access.api_key, *filter(None, [os.environ.get(_KEY_VARIABLE)]))
    server = replace(server, access=replace(server.access, api_key=keys))
    server.check()
    names = server.models.served_model_name or (_EMBEDDED if args.model is None else name_of(args.model),)
    adapters = parse_modules(server.models.lora_modules, server.models.served_model_name)
    also = parse_also(server.models.also, args)
    listen = server.listen
    if not keys and listen.uds is None and listen.host not in ("127.0.0.1", "localhost", "::1"):
        logging.getLogger(__name__).warning(
            "listening on %s without --api-key: everybody there can use it", listen.host
        )
    options = ServerOptions(server, names, adapters, args.otlp_traces_endpoint, rank or 0, started_at())
    _check_names(options, also)
    adapted = [args.enable_lora, *(one.args.enable_lora for one in also)]
    for given, missing in (
        ("lora-modules", adapters and not adapted[0]),
        ("lora-dir", server.models.lora_dir and not any(adapted)),
    ):
        if missing:
            raise ConfigError(f"{given}: adapters are served with --enable-lora; give it too, or leave this out")

    def open_first() -> ResolvedModel:
        resolved = _open(args)
        artifact = Artifact.trusted(Path(resolved.config.load.artifact))
        check_adapters(artifact, [(a.name, a.path) for a in adapters])
        return resolved

    watched = SupervisorOptions(args.seed, server.watch, server.chat)
    further = replace(watched, chat=replace(server.chat, chat_template=None))  # that one is the first model's
    openings = [Opening(names, open_first, watched, children)]
    for one, child in zip(also, others, strict=True):
        started = (child,) if one.args.data_parallel_size == 1 else ()
        openings.append(Opening(one.names, functools.partial(_open, one.args), further, started))
    return serve_forever(openings, options)


def _open(args: EngineArgs) -> ResolvedModel:
    with build_errors():
        return resolve_model(args, base=SamplingParams(max_tokens=None))


def _check_names(options: ServerOptions, also: Sequence[Also]) -> None:
    """Raises ConfigError for a name that stands for two things."""
    names = [*options.names]
    for one in also:
        for name in one.names:
            if name in names:
                raise ConfigError(
                    f"also: the name {name!r:.80} is given twice; give JSON with model and another served_model_name"
                )
        names += one.names
    for adapter in options.adapters:
        if adapter.name in names:
            raise ConfigError(f"lora-modules: {adapter.name!r} is a model's own name; give another one")
    if also and (count := options.config.serving.api_server_count) > 1:
        raise ConfigError(f"api-server-count is {count}: one process speaks HTTP for several models; use 1")


# Settings of the machine, the user and the server; further models have the same as the first.
_COMMON = (
    "target", "backend", "threads", "jobs", "download_dir", "hf_token", "seed", "max_num_queued_reqs",
    "disable_log_stats", "otlp_traces_endpoint",
)  # fmt: skip


def parse_also(given: Sequence[str], first: EngineArgs) -> list[Also]:
    """The further models: folder or name each, or JSON with model, served_model_name and other settings. Raises
    ConfigError."""
    found = []
    common = {name: getattr(first, name) for name in _COMMON}
    for text in given:
        said: Any = {"model": text}
        if text.startswith("{"):
            try:
                said = json.loads(text)
            except ValueError as damage:
                raise ConfigError(f"also is {text!r:.80}: no JSON ({damage})") from damage
        model, names = said.get("model"), said.pop("served_model_name", None)
        if not isinstance(model, str) or not model:
            raise ConfigError(f"also is {text!r:.80}: give a folder, a name, or JSON with model")
        names = [name_of(model)] if names is None else [names] if isinstance(names, str) else names
        if not (isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)):
            raise ConfigError(f"also: served_model_name is {names!r:.80}: give a name, or a list of names")
        found.append(Also(EngineArgs(**{**common, **said}), tuple(names)))
    return found


def end_with_supervisor() -> None:
    """End this server in good order when the supervisor of ranks is gone, which holds the other end of stdin."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one ends it at once

    threading.Thread(target=watch, daemon=True).start()


def started_at() -> float:
    """`time.monotonic` when this process began, from the kernel."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - booted
