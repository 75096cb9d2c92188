"""KVConnector: what brings blocks of the cache from elsewhere and takes them there, a tier whose other end is another
engine or a store. This is the core's side; the ranks' side is `graphllm.runtime.tiers.connector_worker`.

The methods have the names of vLLM's connectors. Contents are known by keys, (cache group, digest): a key stands for a
block's tokens and all before them, and is the same in all engines with the same ``cache_secret``. Group -1 has the
snapshots of recurrent states. All contents come and go by way of host memory, an entry for each key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from graphllm.config import KVTransferConfig
from graphllm.config.vllm.kv_transfer import PARAMS
from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request import TierStats
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.device_states import DeviceStates
from graphllm.engine.tiers.further_tier import Entries, Fetched, FurtherTier
from graphllm.engine.tiers.tier_pool import TierPool, kind_of
from graphllm.engine.tiers.wanted import SNAPSHOT
from graphllm.runtime.commands.connector import CloseConnector, FinishedTransfers, OpenConnector, StartLoads, StartSaves


class ConnectorRequest:
    """A request as connectors see it.

    engine_request: as the core has it.
    kv_transfer_params: as the client, or a router, gave them; empty without.
    """

    def __init__(self, cache: CacheManager, state: RequestState) -> None:
        self._cache, self._state, self.engine_request = cache, state, state.request
        self.kv_transfer_params: Mapping[str, Any] = (state.request.params.extra_args or {}).get(PARAMS) or {}

    @property
    def request_id(self) -> str:
        """Unique among those of the engine."""
        return self.engine_request.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt. Its last token is always computed."""
        return self.engine_request.prompt

    @property
    def num_transferable_tokens(self) -> int:
        """Tokens of the longest beginning of the prompt that can come from elsewhere."""
        return (len(self.prompt_token_ids) - 1) // self._cache.boundary * self._cache.boundary

    @cached_property
    def keys(self) -> list[Key]:
        """Of all that such a beginning may be made of, in the order of the sequence within each group."""
        cache, end, found = self._cache, self.num_transferable_tokens, list[Key]()
        cache.hasher.digest(self._state, end)
        digests, size = self._state.digests, cache.block_size
        for group in cache.groups:
            each = group.unit // size
            found += [(group.number, digest) for digest in digests[each - 1 : end // size : each]]
        each = cache.boundary // size
        found += [(SNAPSHOT, d) for _ in cache.states.pools for d in digests[each - 1 : end // size : each]]
        return found


class FailedLoad(NamedTuple):
    """A request whose contents have not come. message: why, for people."""

    request_id: str
    message: str


@dataclass(frozen=True)
class ConnectorSetup:
    """What a connector is made of.

    config: the setting kv_transfer_config.
    identity: of the model's contents and the layout of blocks: contents of engines with another one are of no use.
    executor: has ranks run commands.
    cache: of the device.
    pools: of the device's cache with its copies in host memory, by kind.
    entry_bytes: of an entry of each kind, of all ranks together.
    """

    config: KVTransferConfig
    identity: str
    executor: DeviceStates
    cache: CacheManager
    pools: Mapping[str, TierPool]
    entry_bytes: Mapping[str, int]


class KVConnector(FurtherTier):
    """Derive from this, and name the ranks' side as ``worker``. All methods run in the core's thread and return at
    once.

    worker: class of the ranks' side, as module:class.
    shares_memory: other processes map the engine's host memory.
    failed: loads that have failed, until `take_failed`.
    """

    name = "connector"
    worker: ClassVar[str] = ""
    shares_memory: ClassVar[bool] = False

    def __init__(self, setup: ConnectorSetup) -> None:
        self.setup, self.config = setup, setup.config
        self.failed = list[FailedLoad]()
        self._tickets = itertools.count(1)
        # Of each load and save that runs: its keys, and the seconds and successes of the ranks that have ended it.
        self._loads = dict[int, list[Key]]()
        self._saves = dict[int, list[Key]]()
        self._ended = dict[int, list[tuple[list[bool], float]]]()
        self._loaded, self._saved = list[Fetched](), list[Key]()
        self._saved_bytes = 0
        setup.executor.do(OpenConnector(self.worker, self.worker_config()))

    # Before there is an engine

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        """Raise ConfigError for settings that it cannot use."""

    @classmethod
    def shared_secret(cls, config: KVTransferConfig) -> str | None:
        """The cache_secret of engines that were given none; None: each has its own, and finds nothing of others."""
        return None

    def worker_config(self) -> dict[str, Any]:
        """The settings of the ranks' side."""
        return dict(self.config.kv_connector_extra_config)

    # What a connector says of requests

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens of a waiting request it may bring beyond those that the device has, and whether they come
        while steps run. None: it is not known yet, and the request waits. Which contents it has, `has` says."""
        return 0, False

    def update_state_after_alloc(self, entries: Entries) -> None:
        """These contents are about to be loaded into these entries of host memory."""

    def build_connector_meta(self, entries: Entries) -> Any:
        """What the ranks must know for a load or a save of these entries, as plain data."""
        return None

    def saves(self, key: Key) -> bool:
        """Whether contents that host memory has now are saved."""
        return self.config.is_producer

    def request_finished(self, request: ConnectorRequest) -> dict[str, Any] | None:
        """A request has its last token: what its answer has as kv_transfer_params; None for nothing. The device still
        has its blocks."""
        return None

    def forget(self, request_id: str) -> None:
        """A request waits no more: it runs, or it has ended."""

    # A tier beyond host memory

    @property
    def writes(self) -> bool:  # type: ignore[override]
        return self.config.is_producer

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._saves)

    def has(self, key: Key) -> bool:
        return False

    def fetch(self, entries: Entries) -> None:
        self.update_state_after_alloc(entries)
        self.start_load(entries, self.build_connector_meta(entries))

    def start_load(self, entries: Entries, metadata: Any) -> int:
        """Have the ranks load; the ticket of this."""
        ticket = next(self._tickets)
        self._loads[ticket] = [key for key, _ in entries]
        self.setup.executor.do(StartLoads(ticket, _described(entries), metadata))
        return ticket

    def fetched(self) -> Sequence[Fetched]:
        self._look()
        found, self._loaded = self._loaded, []
        return found

    def offer(self, entries: Entries) -> Sequence[Key]:
        chosen = [(key, entry) for key, entry in entries if self.saves(key)]
        if chosen:
            ticket = next(self._tickets)
            self._saves[ticket] = [key for key, _ in chosen]
            self.setup.executor.do(StartSaves(ticket, _described(chosen), self.build_connector_meta(chosen)))
        return [key for key, _ in chosen]

    def written(self) -> Sequence[Key]:
        self._look()
        found, self._saved = self._saved, []
        return found

    def _look(self) -> None:
        """Take what has ended on all ranks."""
        if not (self._loads or self._saves):
            return
        answers = self.setup.executor.ask(FinishedTransfers())
        for ticket, done, seconds in itertools.chain.from_iterable(answer.value for answer in answers):
            of_ranks = self._ended.setdefault(ticket, [])
            of_ranks.append((done, seconds))
            if len(of_ranks) < len(answers):
                continue
            del self._ended[ticket]
            success = [all(of) for of in zip(*(of for of, _ in of_ranks), strict=True)]
            if (keys := self._saves.pop(ticket, None)) is not None:
                self._saved += keys
                self._saved_bytes += sum(self._size(key) for key, ok in zip(keys, success, strict=True) if ok)
            else:
                self.load_ended(ticket, self._loads.pop(ticket), success, max(of for _, of in of_ranks))

    def load_ended(self, ticket: int, keys: Sequence[Key], success: Sequence[bool], seconds: float) -> None:
        """A load has ended on all ranks."""
        self._loaded.append(Fetched(dict(zip(keys, success, strict=True)), seconds))

    def take_failed(self) -> list[FailedLoad]:
        """Requests that end with an error, because kv_load_failure_policy is fail."""
        found, self.failed = self.failed, []
        return found

    def pool_of(self, key: Key) -> TierPool:
        """The pool of the device that such contents lie in, and their copies in host memory."""
        return self.setup.pools[kind_of(key)]

    def _size(self, key: Key) -> int:
        return self.setup.entry_bytes[kind_of(key)]

    def use(self, keys: Iterable[Key]) -> None:
        pass

    def reset(self) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats(stored_bytes=self._saved_bytes)

    def close(self) -> None:
        self.setup.executor.do(CloseConnector())


def _described(entries: Entries) -> list[tuple[str, int, bytes, int]]:
    return [(kind_of(key), *key, entry) for key, entry in entries]
