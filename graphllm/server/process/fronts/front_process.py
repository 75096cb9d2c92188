"""One front as its controller knows it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field

from graphllm.host.silence import Silence
from graphllm.server.process.fronts.messages import Report
from graphllm.server.process.fronts.questions import Questions

_HELD_UP = 0.5  # seconds for taking a connection; a front that needs more gets no other connection in that time


@dataclass
class FrontProcess:
    """A front as its controller knows it.

    process: the front's own.
    doorway: passes connections to it.
    questions: asks it.
    silence: the time since its last message.
    started: `time.monotonic` at its start.
    greeted: it has said that it is there.
    joined: folders of the cores that it has joined; None while it takes no connections.
    handed: connections that it has not taken yet, with the time of each, oldest first.
    taken: number of connections that it has taken so far.
    open: number of taken connections that have not ended.
    report: its latest.
    rooms: memory that it holds or waits for, with the task that gives it, by ticket.
    writing: ids of responses that run in the background there.
    """

    name: str
    process: subprocess.Popen[bytes]
    doorway: socket.socket
    questions: Questions
    silence: Silence
    started: float = field(default_factory=time.monotonic)
    greeted: bool = False
    joined: list[str] | None = None
    handed: deque[tuple[socket.socket, float]] = field(default_factory=deque)
    taken: int = 0
    open: int = 0
    report: Report = field(default_factory=lambda: Report({}, 0, 0))
    rooms: dict[int, tuple[contextlib.ExitStack, asyncio.Task[None]]] = field(default_factory=dict)
    writing: set[str] = field(default_factory=set)

    @property
    def load(self) -> tuple[bool, int]:
        """Whether it is held up, and how many connections it has."""
        held_up = bool(self.handed) and time.monotonic() - self.handed[0][1] > _HELD_UP
        return held_up, self.open + len(self.handed)

    def give_back(self, ticket: int) -> None:
        """Its room is free; who still waits for it waits no more."""
        held, task = self.rooms.pop(ticket, (None, None))
        if held is not None and task is not None:
            task.cancel()  # does nothing where it has answered
            held.close()
