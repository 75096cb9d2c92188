"""The cache in tiers: what leaves the device is kept in host memory, and comes back before a request that needs it.

What is evicted without a copy is copied before the step that overwrites it, so nothing is lost: a request that was
preempted finds its blocks again. What is likely to be evicted next is copied ahead of that, while steps run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from graphllm.config import ConfigError
from graphllm.config.setting import size_text
from graphllm.engine.cache.block_pool import Key
from graphllm.engine.parts.part import Kept, Part, PartContext
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput, EngineRequest, TierStats
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.started_step import StartedStep
from graphllm.engine.tiers.further_tier import FurtherTier
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.naps import Naps
from graphllm.engine.tiers.preparing import Preparing
from graphllm.engine.tiers.promotions import HOST, Promotions
from graphllm.engine.tiers.rates import Rates
from graphllm.engine.tiers.tier_pool import BLOCKS, SNAPSHOTS, Pairs, TierPool, kind_of
from graphllm.engine.tiers.wanted import keys_of
from graphllm.host.machine import available_memory
from graphllm.runtime.commands.command import Command
from graphllm.runtime.commands.tiers import (
    AwaitStores,
    CloseTiers,
    EndedCopies,
    LoadEntries,
    OpenTiers,
    StoreEntries,
)

if TYPE_CHECKING:
    from graphllm.engine.transfer.awaiting import Awaiting
    from graphllm.engine.transfer.kv_connector import KVConnector
    from graphllm.runtime.step_handle import StepResult

_log = logging.getLogger(__name__)
# Blocks are copied before they are evicted, for so many steps of the largest size, and for the longest sequence: while
# it comes from host memory, nothing has to be copied there first.
_AHEAD = 2
_PART = 128  # copies that end at the same time
_LEAVING = 1.0  # seconds that copies take before a sleep, at most
_AT_ONCE = 1 << 26  # bytes that are copied at once then
_OFFERS = 0.005  # seconds between two looks at copies that no request waits for: each is a round trip to all ranks


class Tiers(Part):
    """resource: holds requests back while their blocks come."""

    name = "tiers"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        executor, cache, config = context.executor, context.scheduler.cache, context.setup.tiers
        self._bytes = {BLOCKS: sum(executor.block_bytes), SNAPSHOTS: sum(executor.snapshot_bytes)}
        pools = {BLOCKS: cache.pool} if cache.groups else {}
        superseded = {}
        for snapshots in cache.states.pools:
            pools[SNAPSHOTS], superseded[SNAPSHOTS] = snapshots.pool, snapshots.is_superseded
            snapshots.rescued = True
        places = {kind: len(pool.references) for kind, pool in pools.items()}
        entries = _entries(config.kv_offloading_size or 0, places, self._bytes)
        host = {kind: HostCache(count, config.kv_offloading_policy) for kind, count in entries.items()}
        limits = context.limits
        ahead = max(_AHEAD * limits.max_num_batched_tokens, limits.max_len)
        ahead = min(-(-ahead // limits.block_size), len(cache.pool.references) // 2)
        self._most = -(-limits.max_num_batched_tokens // limits.block_size)  # copied ahead before each step
        self._kind_of_connector = self._find_connector()
        self._entries = entries
        shared = self._kind_of_connector is not None and self._kind_of_connector.shares_memory
        executor.do(OpenTiers(entries, shared))
        self.pools = {
            kind: TierPool(kind, pool, host[kind], self._wait, ahead if kind == BLOCKS else 0, superseded.get(kind))
            for kind, pool in pools.items()
        }
        self.preparing = Preparing(executor, self.pools, self._bytes)
        self.further = self.further_tiers()
        for pool in self.pools.values():
            pool.writes = any(tier.writes for tier in self.further)
        self.rates = Rates()
        self.promotions = Promotions(cache, self.pools, self._bytes, self.rates, self.further)
        self.connector: KVConnector | None = None
        self.awaiting: Awaiting | None = None
        if (kind_of_connector := self._kind_of_connector) is not None:
            from graphllm.engine.transfer.awaiting import Awaiting

            self.connector = next(tier for tier in self.further if isinstance(tier, kind_of_connector))
            self.awaiting = Awaiting(cache, self.connector, self.promotions)
        self.resource = self.awaiting or self.promotions
        self._ended_at = 0.0
        self._naps = Naps()
        self._tickets = itertools.count(1)
        self._seconds = dict[int, list[float]]()  # by copy: of each rank on which it has ended
        self._offers = dict[int, list[tuple[Key, int]]]()  # by store: what further tiers are offered when it has ended

    def further_tiers(self) -> list[FurtherTier]:
        """The tiers beyond host memory, the nearest first."""
        return [tier for tier in (self._disk(), self._connector()) if tier is not None]

    # Most engines have no further tiers, and start sooner without what these import.

    def _disk(self) -> FurtherTier | None:
        executor, config = self.context.executor, self.context.setup.tiers
        if config.kv_offloading_disk is None:
            return None
        from graphllm.engine.tiers.disk_tier import DiskTier

        of_ranks = {BLOCKS: executor.block_bytes, SNAPSHOTS: executor.snapshot_bytes}
        sizes = {kind: of_ranks[kind] for kind in self._entries}
        return DiskTier(executor, config.kv_offloading_disk, config.kv_offloading_disk_size, sizes, self._entries)

    def _find_connector(self) -> type[KVConnector] | None:
        if (transfer := self.context.setup.tiers.transfer) is None:
            return None
        from graphllm.engine.transfer.connectors import find_connector

        return find_connector(transfer)

    def _connector(self) -> FurtherTier | None:
        context, setup = self.context, self.context.setup
        if setup.tiers.transfer is None or self._kind_of_connector is None:
            return None
        from graphllm.engine.transfer.kv_connector import ConnectorSetup

        cache, pools = context.scheduler.cache, self.pools
        return self._kind_of_connector(
            ConnectorSetup(setup.tiers.transfer, setup.identity, context.executor, cache, pools, self._bytes)
        )

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        wanted = bool(context.setup.tiers.kv_offloading_size)
        if wanted and not context.scheduler.cache.caching and context.setup.tiers.transfer is not None:
            raise ConfigError(
                "kv_transfer_config: this engine shares no beginnings of prompts, so it has nothing to transfer; leave "
                "out enable_prefix_caching, or give snapshot_memory_bytes where a model has recurrent states"
            )
        if wanted and not context.scheduler.cache.caching:
            _log.warning("kv_offloading_size has no effect: this engine shares no beginnings of prompts")
            return False
        return wanted

    @property
    def busy(self) -> bool:  # type: ignore[override]
        """What comes has blocks of the device, also when nobody wants it any more. Further tiers get what is new."""
        offers = bool(self._offers) or any(pool.has_new for pool in self.pools.values())
        return self.promotions.running > 0 or offers or any(tier.busy for tier in self.further)

    def gather(self, idle: bool) -> Iterable[EngineRequest | EngineCoreOutput]:
        """Take what has come."""
        self.preparing.look(early=bool(self.further))
        if idle and (self.busy or (self.awaiting is not None and self.awaiting.unanswered)):
            self._naps.nap()
        else:
            self._naps.end()
        if self.promotions.running or (self._offers and time.monotonic() >= self._ended_at + _OFFERS):
            self._take_ended()
            self._ended_at = time.monotonic()
        for tier in self.further:
            for keys, seconds in tier.fetched():
                self._naps.end()
                self.promotions.fetched(tier.name, keys, seconds)
                if self.connector is not None:  # it may give to others what has come here
                    came = [(k, self._pool(k).host.find(k)) for k, filled in keys.items() if filled]
                    self._pin(self.connector.offer([(key, entry) for key, entry in came if entry >= 0]))
            self._unpin(tier.written())
        return self._failed()

    def _failed(self) -> Iterable[EngineCoreOutput]:
        """Requests whose contents did not come, and that are not to be computed here."""
        if self.connector is None:
            return
        for id, message in self.connector.take_failed():
            for state in self.context.scheduler.abort([id]):
                yield EngineCoreOutput(state.request.id, [], "error", error=message)

    def _take_ended(self) -> None:
        ranks = self.context.executor.ask(EndedCopies())
        for ticket, seconds in itertools.chain.from_iterable(answer.value for answer in ranks):
            of_ranks = self._seconds.setdefault(ticket, [])
            of_ranks.append(seconds)
            if len(of_ranks) < len(ranks):
                continue
            del self._seconds[ticket]
            self._naps.end()
            if ticket in self._offers:
                self._offer(self._offers.pop(ticket))
            else:
                self.promotions.ended(ticket, max(of_ranks))

    def _wait(self, ticket: int) -> None:
        self.context.executor.do(AwaitStores(ticket))

    def _offer(self, entries: list[tuple[Key, int]]) -> None:
        """Host memory has these; each was pinned for this."""
        for tier in self.further:
            self._pin(tier.offer(entries))
        self._unpin(key for key, _ in entries)

    def _pin(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._pool(key).host.pin([key])

    def _unpin(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._pool(key).host.unpin([key])

    def _pool(self, key: Key) -> TierPool:
        return self.pools[kind_of(key)]

    def planned(self, plan: SchedulerOutput | None) -> None:
        """Copy what would be lost, and start what waiting requests want."""
        for state in plan.admitted if plan is not None else ():
            for tier in self.further:
                tier.use(keys_of(self.context.scheduler.cache, state, state.cached_tokens))
        pools = self.pools.values()
        self.preparing.make_room({pool.kind: pool.num_lost for pool in pools if pool.num_lost})
        if rescues := {pool.kind: pairs for pool in pools if (pairs := pool.rescues())}:
            self._store(rescues, next(self._tickets), blocking=True)
        after = 0
        if displaced := {pool.kind: pairs for pool in pools if (pairs := pool.displaced())}:
            self._store(displaced, after := next(self._tickets), blocking=False)
        while loads := self.promotions.start(ticket := next(self._tickets)):
            after = max(after, *(self.pools[kind].load_after(pairs) for kind, pairs in loads.items()))
            self.context.executor.do(LoadEntries(loads, ticket, after))
        if plan is None:
            self._copy_ahead()

    def started(self, step: StartedStep) -> Iterable[Command]:
        """Copy ahead while it runs."""
        self._copy_ahead()
        return ()

    def _copy_ahead(self) -> None:
        loading = self.promotions.running > 0
        for copies in _parts({kind: pool.copies(self._most, loading) for kind, pool in self.pools.items()}):
            self._store(copies, next(self._tickets), blocking=False, ahead=True)

    def leave(self) -> None:
        """What only the device has is copied, the most recently used first, for a second at most: a conversation goes
        on after a sleep without being computed again."""
        until = time.monotonic() + _LEAVING
        self._naps.end()
        for kind, pool in reversed(self.pools.items()):  # snapshots are few, and blocks are of no use without them
            left, count = pool.unsaved(), max(1, _AT_ONCE // self._bytes[kind])
            saved = list(left)
            self.preparing.has_room(kind, len(left))
            while left and time.monotonic() < until:
                part = left[:count]
                if not self.preparing.has_room(kind, len(part)):
                    self._naps.nap()
                    continue
                del left[:count]
                if pairs := pool.save(part):
                    self._store({kind: pairs}, ticket := next(self._tickets), blocking=True, awaited=True)
                    while ticket in self._offers and time.monotonic() < until:
                        self._take_ended()
            for key, _ in reversed(saved):
                pool.host.use(key)

    def _store(
        self, pairs: dict[str, Pairs], ticket: int, blocking: bool, ahead: bool = False, awaited: bool = False
    ) -> None:
        """ahead: of eviction. awaited: its end is asked for."""
        reported = awaited or bool(self.further)
        for kind, of in pairs.items():
            self.pools[kind].stores(of, ticket, ahead)
        placed = [entry for kind, of in pairs.items() for entry in self.pools[kind].placed(len(of))]
        self.context.executor.do(StoreEntries(pairs, ticket, blocking, reported))
        if reported:
            self._offers[ticket] = placed
            self._pin(key for key, _ in placed)

    def arrived(self, step: StartedStep, result: StepResult) -> None:
        if not step.plan.verified:
            self.rates.computed(step.batch.step.tokens, step.seconds)

    def complete(self, state: RequestState, output: EngineCoreOutput) -> None:
        if self.awaiting is not None and state.finish_reason in ("stop", "length"):
            output.kv_transfer_params = self.awaiting.finished(state)

    def end(self, id: str, output: Sequence[int]) -> None:
        self.promotions.forget(id)
        if self.awaiting is not None:
            self.awaiting.forget(id)

    def stats(self, into: CoreStats) -> None:
        host = TierStats(hit_tokens=round(self.promotions.hits[HOST]), copied_bytes=self.promotions.copied[HOST])
        for kind, pool in self.pools.items():
            host.total_bytes += pool.host.num_entries * self._bytes[kind]
            host.used_bytes += len(pool.host) * self._bytes[kind]
            host.stored_bytes += pool.num_stored * self._bytes[kind]
        into.tiers[HOST] = host
        for tier in self.further:
            into.tiers[tier.name] = found = tier.stats()
            found.hit_tokens = round(self.promotions.hits[tier.name])
            found.copied_bytes = self.promotions.copied[tier.name]

    def reset(self, where: Kept) -> None:
        if where == "device":
            return
        for ticket, entries in self._offers.items():  # of what is forgotten now
            self._unpin(key for key, _ in entries)
            self._offers[ticket] = []
        for pool in self.pools.values():
            pool.host.clear()
        for tier in self.further if where == "everywhere" else ():
            tier.reset()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # after a failure of the steps nobody is there
            for tier in self.further:
                tier.close()
            self.context.executor.do(CloseTiers())


def _parts(pairs: Mapping[str, Pairs]) -> Iterator[dict[str, Pairs]]:
    """The same in small parts: who needs the place of one copy waits for no more than its part."""
    for kind, of in pairs.items():
        for at in range(0, len(of), _PART):
            yield {kind: of[at : at + _PART]}


def _entries(size: int, places: Mapping[str, int], entry_bytes: Mapping[str, int]) -> dict[str, int]:
    """Entries of each kind of host memory of so many bytes, in the ratio of the device's. Raises ConfigError."""
    if size > (free := available_memory()):
        raise ConfigError(
            f"kv_offloading_size is {size_text(size)}: the host has {size_text(free)} of memory left; give less"
        )
    if size < (least := sum(entry_bytes[kind] for kind in places)):
        raise ConfigError(f"kv_offloading_size is {size}: copies take {least} bytes at least; give more")
    device = sum(places[kind] * entry_bytes[kind] for kind in places)
    return {kind: max(1, size * places[kind] // device) for kind in places}
