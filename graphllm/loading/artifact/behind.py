"""Compiling an artifact behind an engine that runs on prebuilt kernels: in a process of its own, which takes only time
that nobody else wants, and goes on when the engine has ended.

``python -m`` this takes an `Order` from stdin. What goes wrong is left next to the artifact's place, and the next start
says it and does not try again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from graphllm.config import CompileConfig, Env
from graphllm.host.build_lock import build_lock, is_locked
from graphllm.host.importing import import_path
from graphllm.loading.checkpoint.source import Source, open_source

_log = logging.getLogger(__name__)


class Order(msgspec.Struct):
    """What to compile.

    source: what `open_source` was given.
    name, commit: of the model, for people.
    place: the folder of the artifact.
    """

    source: dict[str, Any]
    name: str
    commit: str | None
    config: CompileConfig
    place: str


def compile_behind(source: Source, config: CompileConfig, env: Env, place: Path) -> None:
    """Begin to compile at ``place``, unless that is under way, or has failed, or there is no compiler."""
    if shutil.which("g++") is None:
        _log.info("prebuilt kernels: g++ is not installed, so no code of the model's own is compiled")
        return
    if (said := failure_of(place)) is not None:
        _log.warning(
            "prebuilt kernels: the model's own code could not be compiled (%s); graphllm compile tries again", said
        )
        return
    if is_locked(place):
        return
    order = Order(dict(source.asked), source.name, source.commit, replace(config, dump=None), str(place))
    # Not in a session of its own: Linux shares the CPUs among sessions first, whatever the priorities within each.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, process_group=0,
        env={**os.environ, "PYTHONPATH": import_path(), "GRAPHLLM_CACHE": str(env.cache_dir)},
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(order, enc_hook=str))
    # Somebody must take its status, whenever that comes.
    threading.Thread(target=process.wait, name="graphllm-behind", daemon=True).start()
    _log.info("prebuilt kernels: the model's own code is compiled meanwhile, into %s", place)


def failure_of(place: Path) -> str | None:
    """Why compiling at a place has failed; None where it has not."""
    with contextlib.suppress(OSError):
        return _failure_file(place).read_text().strip() or "no reason was given"
    return None


def _failure_file(place: Path) -> Path:
    return place.with_name(f".{place.name}.failed")


def main(said: bytes) -> None:
    """Compile what was ordered, unless it is there."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    order = msgspec.json.decode(said, type=Order)
    place = Path(order.place)
    try:
        with build_lock(place):
            if not (place / "manifest.json").exists():
                _compile(order, place)
    except Exception as failure:
        _failure_file(place).write_text(" ".join(str(failure).split())[:500] or type(failure).__name__)
        raise
    _failure_file(place).unlink(missing_ok=True)


def _compile(order: Order, place: Path) -> None:
    from graphllm.loading.artifact.compiling import build

    found = open_source(**order.source)
    source = replace(found, name=order.name, commit=order.commit)
    build(source, source.tensors, order.config, Env.read(), _silent, place, False)


def _silent(stage: str, done: int, total: int) -> None:
    """Nobody looks."""


if __name__ == "__main__":
    main(sys.stdin.buffer.read())
