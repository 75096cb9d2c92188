"""A rank's own process: it loads its share, then does what rank 0's process says, until that stops it or is gone."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from graphllm.config import ConfigError
from graphllm.runtime.commands.command import Query, Sent
from graphllm.runtime.memory.staging import Sampling
from graphllm.runtime.ranks.broadcast import Reader
from graphllm.runtime.ranks.rank_messages import (
    Allocate,
    Counted,
    Failed,
    Follow,
    Loaded,
    Message,
    Report,
    Sample,
    Serving,
    Start,
    Stop,
)

if TYPE_CHECKING:
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.step_handle import StepHandle

LIFE = 1  # the word of a rank that it counts up while it lives, once it serves
CHECKS = 64  # words after it: checksums of what the last steps sampled, by number
FIRST_CHECK = 64
_BEAT = 0.25  # seconds


class Settings(msgspec.Struct):
    """What a rank gets at its start.

    rank, degree: its number, and ranks in all.
    reader, readers: its number among the readers of its host's memory of commands, and their count.
    folder: of this engine's ranks on this host, for as long as they live.
    meeting: where all ranks meet.
    load: how to load.
    started: `time.monotonic`.
    """

    rank: int
    degree: int
    reader: int
    readers: int
    folder: str
    meeting: str
    load: dict[str, Any]
    started: float


class Share(Protocol):
    """A rank's weights, and what is made of them. spin: seconds in which a process looks for its next command before
    it sleeps; see `Reader`."""

    spin: float

    def join(self) -> AbstractContextManager[None]:
        """Meet the other ranks, for as long as the context lasts."""

    def count(self) -> tuple[int, int]:
        """Blocks and snapshots that there is memory for."""

    def executor(self, blocks: int, snapshots: int) -> Executor:
        """Runs the artifact."""


Load = Callable[[Settings], Share]


def send(fd: int, message: bytes) -> None:
    """Write a message to a pipe, after its length."""
    rest = memoryview(struct.pack("<Q", len(message)) + message)
    while rest:
        rest = rest[os.write(fd, rest) :]


def receive(fd: int) -> bytes | None:
    """The next message of a pipe, None when there is none any more."""
    head = _exactly(fd, 8)
    return None if head is None else _exactly(fd, struct.unpack("<Q", head)[0])


def _exactly(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def run_rank(load: Load, preload: Callable[[], None]) -> None:
    """The process's whole life.

    load: reads this rank's weights.
    preload: imports what that needs.
    """
    ring = int(sys.argv[1])
    reports = os.dup(1)
    os.dup2(2, 1)  # what is printed must not mix with reports
    begun = time.monotonic()
    preload()
    preloaded = time.monotonic()
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            sys.exit(1)
        line += piece
    settings = msgspec.json.decode(line, type=Settings)
    threading.Thread(target=_end_with_parent, args=(settings.folder,), daemon=True).start()
    encode = msgspec.msgpack.Encoder().encode

    def report(news: Report) -> None:
        send(reports, encode(news))

    seconds = {"process": begun - settings.started, "import torch": preloaded - begun}
    stopped = False
    try:
        _live(settings, load, ring, report, seconds)
        stopped = True
    except Exception as failure:
        config = isinstance(failure, ConfigError)
        if not config:
            traceback.print_exc()
        report(Failed(str(failure) if config else f"{type(failure).__name__}: {failure}", config))
    sys.stderr.flush()
    # A rank that failed may have threads that wait for the others for ever.
    os._exit(0 if stopped else 1)


def _live(
    settings: Settings, load: Load, ring: int, report: Callable[[Report], None], seconds: dict[str, float]
) -> None:
    begun = time.monotonic()
    share = load(settings)
    reader = Reader(ring, settings.readers, settings.reader, share.spin)
    loaded = time.monotonic()
    report(Loaded({**seconds, "weights": loaded - begun}))
    with share.join():
        joined = time.monotonic()
        report(Counted(*share.count()))
        decode = msgspec.msgpack.Decoder(Message).decode
        allocate = decode(reader.read())
        assert isinstance(allocate, Allocate)
        executor = share.executor(allocate.blocks, allocate.snapshots)
        threading.Thread(target=_beat, args=(reader,), daemon=True).start()
        seconds = {"join": joined - loaded, "executor": time.monotonic() - joined}
        report(Serving(seconds, executor.states.block_bytes, executor.states.snapshot_bytes))
        _Follower(executor, settings, reader, report).run(decode)
        executor.close()


class StepChecks:
    """Numbers steps, and makes a checksum of the tokens that each sampled, once its result is there.

    Call `retire` when ``in_flight`` steps are open, before another starts: its result takes the place of the oldest.
    """

    def __init__(self, in_flight: int) -> None:
        self._steps: deque[StepHandle] = deque()
        self._most = in_flight
        self._number = 0

    def add(self, handle: StepHandle) -> None:
        """A step was started."""
        self._steps.append(handle)

    def full(self) -> bool:
        return len(self._steps) == self._most

    def retire(self) -> tuple[int, int]:
        """The number of the oldest step, and its word; waits for its end."""
        handle = self._steps.popleft()
        handle.settle()
        tokens = handle.outputs.get("tokens")
        self._number += 1
        check = 0 if tokens is None else zlib.crc32(tokens.data)
        return self._number, (self._number & 0xFFFFFFFF) << 32 | check


class _Follower:
    """Obeys rank 0."""

    def __init__(
        self, executor: Executor, settings: Settings, reader: Reader, report: Callable[[Report], None]
    ) -> None:
        self._executor = executor
        executor.worker.rank, executor.worker.world_size = settings.rank, settings.degree
        self._reader, self._report = reader, report
        self._checks = StepChecks(executor.in_flight)
        self._last: StepHandle | None = None

    def run(self, decode: Callable[[bytearray], Message]) -> None:
        while not isinstance(message := decode(self._reader.read()), Stop):
            self._obey(message)

    def _obey(self, message: Message) -> None:
        executor = self._executor
        match message:
            case Start():
                if self._checks.full():
                    number, word = self._checks.retire()
                    self._reader.words[FIRST_CHECK + number % CHECKS] = word
                self._last = executor.start(message.step(), message.program, message.drafts)
                self._checks.add(self._last)
            case Follow(keep):
                executor.stream.release(keep)
            case Sent():
                command = message.command()
                if isinstance(command, Query):
                    self._report(command.run(executor))
                else:
                    command.run(executor)
            case Sample(mask, scores, edited):
                from graphllm.runtime.ranks.collectives import send_logits

                assert self._last is not None
                given = None if mask is None else mask.numpy()
                hook = send_logits if edited else None
                executor.sample(self._last, Sampling(given, scores, hook=hook))


def _beat(reader: Reader) -> None:
    """Signs of life."""
    while True:
        reader.words[LIFE] += 1
        time.sleep(_BEAT)


def _end_with_parent(folder: str) -> None:
    """End this process when its input does: rank 0 is gone, or wants no more."""
    while os.read(0, 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
