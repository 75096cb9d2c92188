"""`truncation: "auto"`: the oldest turns of a conversation are left out until the rest fits the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import takewhile

from graphllm.server.apis.responses.requests import Chat


async def fitting(messages: Chat, room: int, fits: Callable[[Chat, int], Awaitable[bool]]) -> Chat:
    """As many of the newest turns as fit. What stands before the first turn, which is the system's, stays, and so does
    the last turn, whether it fits or not.

    A turn is a message of the user's and all that follows it, so that the output of a tool never stands without its
    call. room: tokens that the answer wants; where even the last turn leaves less, one token must do. fits: whether
    messages leave so much.
    """
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    turns = [i for i, message in enumerate(messages) if i >= len(system) and message["role"] == "user"]
    # From the first message on, too, where that is not the user's.
    starts = sorted({len(system), *turns})

    async def first(wanted: int) -> int:
        """The number of the first start that fits; their count if none does."""
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            if await fits([*system, *messages[starts[middle] :]], wanted):
                high = middle
            else:
                low = middle + 1
        return low

    if await fits(messages, room):
        return messages
    found = await first(room)
    if found == len(starts):
        found = await first(1)
    return [*system, *messages[starts[min(found, len(starts) - 1)] :]]
