"""ControlLink: a front's connection to its controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from graphllm.server.process.fronts.messages import (
    ControllerAsks,
    End,
    EngineState,
    FrontAnswer,
    FrontAsks,
    Hello,
    OfController,
    ToFront,
    address,
)
from graphllm.server.process.fronts.questions import Questions, answer


class ControlLink:
    """In the event loop that calls `run`. name: of the front. It lives as long as the controller, so nothing here
    waits for one that is gone."""

    def __init__(self, name: str, folder: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, name.encode())
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 1000)  # milliseconds for what is kept of responses
        self._socket.connect(address(folder))
        self._encode = msgspec.json.Encoder().encode
        self._questions = Questions(lambda number, question: self.tell(FrontAsks(number, question)))
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, message: msgspec.Struct) -> None:
        """Send something that has no answer."""
        self._socket.send(self._encode(message))  # done at once: there is no limit to what may wait

    async def ask(self, question: msgspec.Struct, kind: Any = None) -> Any:
        """The answer, of this type."""
        return await self._questions.ask(question, kind)

    async def run(
        self, on_state: Callable[[EngineState], None], asked: Callable[[OfController], Awaitable[Any]]
    ) -> None:
        """Listen until the server ends. on_state: gets each state. asked: answers questions."""
        decode = msgspec.json.Decoder(ToFront).decode
        self.tell(Hello())
        while True:
            match decode(await self._socket.recv()):
                case EngineState() as state:
                    on_state(state)
                case ControllerAsks(number, question):
                    task = asyncio.create_task(answer(number, asked(question), self.tell))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case FrontAnswer() as found:
                    self._questions.answered(found)
                case End():
                    return

    def close(self) -> None:
        self._context.destroy()
