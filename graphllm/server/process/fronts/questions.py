"""Questions to another process that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from graphllm.server.process.fronts.messages import FrontAnswer

_encode = msgspec.json.Encoder().encode


class EndedError(Exception):
    """The process that was asked has ended."""


class Questions:
    """To one process. send: a question with its number, in the message for it."""

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[FrontAnswer]] = {}

    async def ask(self, question: msgspec.Struct, kind: Any = None) -> Any:
        """The answer, of this type. Raises EndedError."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, question)
            answer = await self._waiting[number]
        finally:
            del self._waiting[number]
        if answer.wrong:
            raise RuntimeError(f"{type(question).__name__}: {answer.wrong}")
        return msgspec.json.decode(answer.value, type=kind)

    def answered(self, answer: FrontAnswer) -> None:
        """An answer has come; its question may not be waited for any more."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self) -> None:
        """There will be no more answers."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EndedError())


async def answer(number: int, work: Awaitable[Any], send: Callable[[FrontAnswer], None]) -> None:
    """Do what was asked, and send what comes of it."""
    try:
        value = await work
    except Exception as defect:  # whoever asked must not wait for ever
        send(FrontAnswer(number, wrong=f"{type(defect).__name__}: {defect}"))
    else:
        send(FrontAnswer(number, msgspec.Raw(_encode(value))))
