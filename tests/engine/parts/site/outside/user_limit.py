"""A limit of running requests for each user, whom a request names by ``extra_args``: the others wait, and let those of
other users pass."""

from __future__ import annotations

import collections

from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.resource import Resource

MOST = 2


def _user(state: RequestState) -> str | None:
    return (state.request.params.extra_args or {}).get("limited_user")


class _Places(Resource):
    def __init__(self) -> None:
        self._running: dict[str, set[str]] = collections.defaultdict(set)

    def acquire(self, state: RequestState) -> bool:
        user = _user(state)
        if user is None:
            return True
        if len(self._running[user]) >= MOST:
            return False
        self._running[user].add(state.request.id)
        return True

    def release(self, state: RequestState, joined: bool) -> None:
        if (user := _user(state)) is not None:
            self._running[user].discard(state.request.id)


class UserLimit(Part):
    """MOST requests of a user run at once."""

    name = "user_limit"
    after = "adapters"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self.resource = _Places()
