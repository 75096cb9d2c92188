"""AdapterTable: which adapters have an entry of the tables on the device, and which request may take one. No torch.

A request takes the entry of its adapter when it gets a slot, and gives it back when it loses the slot. An entry that no
running request has keeps its adapter until another one needs it; the least recently taken goes first. Where none is
left for the oldest request that waits for one, the least recently taken entry is *reserved*: requests younger than that
one no longer take it, so it becomes free however many of them come.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.config import ConfigError
from graphllm.engine.requests.request import Adapter, EngineRequest
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.schedule.scheduler import Scheduler

NO_TABLES = "this artifact has no tables for adapters; compile with --enable-lora"


class AdapterTable(Resource):
    """Which adapter has which entry.

    count: entries without the neutral one, 0.
    in_memory: digests of the adapters with tables in the host's memory; the owner keeps it up to date.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.in_memory: set[str] = set()
        self._digests: list[str] = [""] * (count + 1)  # by entry
        self._users, self._written = [0] * (count + 1), [False] * (count + 1)
        self._entries: dict[str, int] = {}  # by digest, the least recently taken first
        self._reserved: dict[int, RequestState] = {}
        self._wanted: dict[str, Adapter] = {}
        self._writes: list[tuple[int, str]] = []

    def check(self, request: EngineRequest) -> None:
        """Raise ConfigError for a request with an adapter where there is no table."""
        if request.adapter is not None and not self.count:
            raise ConfigError(f"request {request.id}: adapter {request.adapter.name!r}: {NO_TABLES}")

    def begin(self) -> None:
        """A look at all that wait begins, in their order."""
        self._reserved.clear()
        self._wanted.clear()

    def acquire(self, state: RequestState) -> bool:
        """Whether a request can run now: it has no adapter, or takes the entry of its own."""
        adapter = state.request.adapter
        if adapter is None:
            return True
        entry = self._entries.get(adapter.digest, 0)
        if not entry:
            entry = self._free_entry()
            if not entry:
                self._reserve(state)
                return False
            self._entries.pop(self._digests[entry], None)
            self._digests[entry], self._written[entry] = adapter.digest, False
            self._entries[adapter.digest] = entry
        elif entry in self._reserved and self._reserved[entry] < state:
            return False
        if not self._written[entry]:
            if adapter.digest not in self.in_memory:
                self._wanted[adapter.digest] = adapter
                return False
            self._writes.append((entry, adapter.digest))
            self._written[entry] = True
        self._entries[adapter.digest] = self._entries.pop(adapter.digest)
        self._users[entry] += 1
        state.adapter_entry = entry
        return True

    def place(self, state: RequestState, table: RequestTable) -> None:
        """Note which entry the request reads."""
        table.adapter_id[state.slot] = state.adapter_entry

    def release(self, state: RequestState, joined: bool) -> None:
        """Give back the entry that a request has taken, if it has."""
        self._users[state.adapter_entry] -= state.adapter_entry > 0
        state.adapter_entry = 0

    def writes(self) -> list[tuple[int, str]]:
        """Entries to be written before the next step, with the digests of their adapters; each is returned once."""
        found, self._writes = self._writes, []
        return found

    @property
    def wanted(self) -> Sequence[Adapter]:
        """Adapters that have an entry, but are not in memory, in the order of the requests that wait for them."""
        return list(self._wanted.values())

    @property
    def used(self) -> list[str]:
        """Digests of the adapters that running requests have."""
        return [digest for digest, entry in self._entries.items() if self._users[entry]]

    def forget(self, digest: str) -> None:
        """Give up the entry of an adapter that no request has, because it cannot be read or is to be written anew."""
        entry = self._entries.get(digest, 0)
        if entry and not self._users[entry]:
            del self._entries[digest]
            self._digests[entry], self._written[entry] = "", False

    def _free_entry(self) -> int:
        unused = (entry for entry in range(1, self.count + 1) if not self._digests[entry])
        kept = (e for e in self._entries.values() if not self._users[e] and not self._loading(e))
        return next(unused, 0) or next(kept, 0)

    def _loading(self, entry: int) -> bool:
        return not self._written[entry] and self._digests[entry] not in self.in_memory

    def _reserve(self, state: RequestState) -> None:
        digests = {s.request.adapter.digest for s in self._reserved.values() if s.request.adapter is not None}
        assert state.request.adapter is not None
        if state.request.adapter.digest not in digests:
            entry = next((e for e in self._entries.values() if e not in self._reserved), 0)
            if entry:
                self._reserved[entry] = state


def fail_waiting(scheduler: Scheduler, table: AdapterTable, digest: str, error: str) -> list[RequestState]:
    """End the requests that wait for an adapter that cannot be read; those that there were."""
    table.forget(digest)
    waiting = [(s, s.request.adapter) for s in scheduler.states if s.slot < 0]
    found = [state for state, adapter in waiting if adapter is not None and adapter.digest == digest]
    for state in found:
        scheduler.fail(state, error)
    return found
