"""`graphllm serve`: the log of a server, its keys and names; the server itself is `graphllm.server.process.launch`."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
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
from graphllm.engine.chat_template.conversation import check_template_kwargs
from graphllm.engine.process.spawn import Child
from graphllm.entrypoints.adapters import check_adapters
from graphllm.loading.artifact.model import ResolvedModel, resolve_model
from graphllm.loading.checkpoint.hub import name_of
from graphllm.program.artifact import Artifact
from graphllm.server.http.rate_limit import RateLimit
from graphllm.server.process.launch import Opening
from graphllm.server.process.launch import serve as serve_forever
from graphllm.server.process.options import ServerOptions
from graphllm.server.supervision.engine_view import SupervisorOptions

_KEY_VARIABLE = "GRAPHLLM_API_KEY"
_EMBEDDED = "graphllm-embedded"
_ORPHAN_GRACE = 5.0  # seconds
_FRONTS = 64  # more than any engine can feed


class Also(NamedTuple):
    """A model beside the first one. names: in requests."""

    args: EngineArgs
    names: tuple[str, ...]


def serve(
    args: EngineArgs,
    also: Sequence[Also],
    options: ServerOptions,
    host: SupervisorOptions,
    children: Sequence[Child],
    others: Sequence[Child],
) -> int:
    """Serve models until told to stop; the exit status. children: processes of the first one's engine cores; others: of
    the engines of those beside it. Raises ConfigError for what cannot be used."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for setting, seconds in (("shutdown-timeout", options.shutdown_timeout), ("step-timeout", host.step_timeout)):
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{setting} is {seconds}: give seconds from 0")
    name = _EMBEDDED if args.model is None else name_of(args.model)
    access = options.access
    keys = [*access.keys, *filter(None, [os.environ.get(_KEY_VARIABLE)])]
    for option, given in (("api-key", keys), ("admin-api-key", access.admin_keys)):
        if any(not key.strip() for key in given):
            raise ConfigError(f"{option} is empty: give one of at least one character, or leave it out")
    options = replace(options, access=replace(access, keys=keys), names=tuple(options.names) or (name,))
    if not keys and options.uds is None and options.host not in ("127.0.0.1", "localhost", "::1"):
        logging.getLogger(__name__).warning(
            "listening on %s without --api-key: everybody there can use it", options.host
        )
    _check_names(options, also)
    adapted = [args.enable_lora, *(one.args.enable_lora for one in also)]
    for given, missing in (
        ("lora-modules", options.adapters and not adapted[0]),
        ("lora-dir", options.lora_dir and not any(adapted)),
    ):
        if missing:
            raise ConfigError(f"{given}: adapters are served with --enable-lora; give it too, or leave this out")

    def open_first() -> ResolvedModel:
        resolved = _open(args)
        artifact = Artifact.trusted(Path(resolved.config.load.artifact))
        check_adapters(artifact, [(a.name, a.path) for a in options.adapters])
        return resolved

    beside = replace(host, chat_template=None)  # which is the first model's
    openings = [Opening(options.names, open_first, host, children)]
    for one, child in zip(also, others, strict=True):
        started = (child,) if one.args.data_parallel_size == 1 else ()
        openings.append(Opening(one.names, functools.partial(_open, one.args), beside, started))
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
    if also and options.fronts > 1:
        raise ConfigError(f"api-server-count is {options.fronts}: one process speaks HTTP for several models; use 1")


# Of the machine, the user and the server: what holds for one model holds for those beside it.
_COMMON = (
    "target", "backend", "threads", "jobs", "download_dir", "hf_token", "seed", "max_num_queued_reqs",
    "disable_log_stats", "otlp_traces_endpoint",
)  # fmt: skip


def parse_also(given: Sequence[str], first: EngineArgs) -> list[Also]:
    """Models that are served beside the first: folder or name each, or JSON with model, served_model_name and other
    settings. Raises ConfigError."""
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


def read_template(given: str | None) -> str | None:
    """A chat template: a file, or the text itself. Raises ConfigError for a file that cannot be read."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigError(f"chat-template is {given!r:.80}: no file that can be read, and no template") from reason


def read_kwargs(given: str | None) -> dict[str, Any]:
    """Variables of chat templates, as JSON. Raises ConfigError."""
    try:
        found = json.loads(given or "{}")
    except ValueError as damage:
        raise ConfigError(f"default-chat-template-kwargs is {given!r:.80}: no JSON ({damage})") from damage
    if not isinstance(found, dict):
        raise ConfigError(f"default-chat-template-kwargs is {given!r:.80}: give a JSON object")
    check_template_kwargs(found, "default-chat-template-kwargs")
    return found


def words(given: Sequence[str] | None, default: Sequence[str] = ()) -> tuple[str, ...]:
    """What came in an option that may be repeated; vLLM's users give a JSON list, or several behind commas."""
    found: list[str] = []
    for text in given or default:
        found += json.loads(text) if text.startswith("[") else text.split(",")
    return tuple(found)


def lora_dir(given: str | None) -> str | None:
    """A folder of adapters. Raises ConfigError where it is none."""
    if given is None:
        return None
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"lora-dir is {given!r:.80}: no folder; give the one whose adapters requests may load")
    return str(folder)


def root_path(given: str) -> str:
    """A path without a slash at its end. Raises ConfigError."""
    path = given.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path):
        raise ConfigError(f"root-path is {given!r:.80}: give a path such as /models/chat")
    return path


def front_count(given: int) -> int:
    """How many processes speak HTTP. Raises ConfigError."""
    if not 1 <= given <= _FRONTS:
        raise ConfigError(f"api-server-count is {given}: give a number from 1 to {_FRONTS}")
    return given


def rate_limit(tokens: int | None, seconds: float) -> RateLimit | None:
    """Of each caller. Raises ConfigError."""
    if tokens is None:
        return None
    if tokens < 1 or not 0 < seconds < math.inf:
        name, value = ("token", tokens) if tokens < 1 else ("interval", seconds)
        raise ConfigError(f"rate-limit-{name} is {value}: give a number above 0")
    return RateLimit(tokens, seconds)
