"""A machine that lends its devices to an engine elsewhere: what it needs of the artifact and the checkpoint, and its
life. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from graphllm.config import ConfigError, CoreConfig
from graphllm.loading.core.rank_main import COMMAND
from graphllm.program.artifact import Artifact
from graphllm.runtime.ranks.node import Prepare, lead_node
from graphllm.runtime.ranks.node_messages import Begin, Hello
from graphllm.runtime.ranks.rank_failure import RankError

_AGAIN = 1.0  # seconds between two looks for an engine
_REMINDER = 20.0  # seconds between two lines of the log while there is none

_log = logging.getLogger(__name__)


def manifest_digest(folder: Path) -> str:
    """SHA-256 of an artifact's manifest.json, which has a SHA-256 for each of its files; "" where there is none."""
    try:
        return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def artifact_files(folder: Path) -> dict[str, bytes]:
    """All files of an artifact, by their path in it."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def preparer(model: Path | None) -> Prepare:
    """Says what this machine's ranks load: the engine's own settings, with the artifact that is here or is sent, and
    the checkpoint in ``model``, None for the same path as there."""

    def prepare(begin: Begin, fetch: Callable[[], Mapping[str, bytes]], folder: Path) -> dict[str, Any]:
        config = msgspec.convert(begin.load, CoreConfig)
        place = Path(config.load.artifact)
        if manifest_digest(place) != begin.manifest:
            place = folder / "artifact"
            for name, data in fetch().items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(data)
        Artifact.open(place).check_machine()
        checkpoint = model or Path(config.model.model)
        if config.load.load_format != "dummy" and not checkpoint.exists():
            raise ConfigError(
                f"model: {str(checkpoint)!r} is not on {socket.gethostname()}; put the checkpoint there, in a folder "
                "that machines share, or start the node by `graphllm serve MODEL --headless` with its own"
            )
        return msgspec.to_builtins(
            dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, model=str(checkpoint)),
                load=dataclasses.replace(config.load, artifact=str(place)),
            )
        )

    return prepare


def serve_node(host: str, port: int, number: int, model: Path | None) -> None:
    """Lend this machine to one engine after the other that listens at that address, until somebody ends the process.
    number: of the node, from 1. model: the folder of the checkpoint here, None for the path that engines say."""
    hello, reminded = Hello(number, "", socket.gethostname()), 0.0
    while True:
        try:
            if lead_node((host, port), hello, COMMAND, preparer(model)):
                _log.info("node %d: the engine has ended", number)
                reminded = 0.0
        except (ConfigError, RankError) as failure:
            _log.error("node %d: %s", number, failure)
            reminded = 0.0
        except OSError:
            if not reminded or time.monotonic() - reminded > _REMINDER:
                reminded = time.monotonic()
                _log.info("node %d waits for an engine at %s:%d", number, host, port)
        time.sleep(_AGAIN)
