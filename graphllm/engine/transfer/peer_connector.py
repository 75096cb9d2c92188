"""PeerConnector: blocks between engines, from the host memory of one to that of the other.

An engine that computes prompts for others keeps the blocks of such a request in its host memory. The engine that goes
on with the request asks for them by their keys, its ranks copy them, and then it asks whether all was still there.
Either engine may end at any moment: what the other one misses then, it computes.

How engines meet and how ranks copy is up to the classes that are derived from this one.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

from graphllm.config import ConfigError, KVTransferConfig
from graphllm.config.parameter import is_number
from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.cache_exchange import CacheExchange
from graphllm.engine.tiers.further_tier import Entries, Fetched
from graphllm.engine.transfer.kv_connector import ConnectorRequest, ConnectorSetup, FailedLoad, KVConnector
from graphllm.engine.transfer.peer_identity import Address, PeerIdentity
from graphllm.engine.transfer.peer_lease import PeerError, PeerLease
from graphllm.engine.transfer.peer_server import PeerServer
from graphllm.engine.transfer.shared_entries import SharedEntries
from graphllm.runtime.commands.connector import HandshakeMetadata

_log = logging.getLogger(__name__)
_KEEP = 120.0  # seconds that a request's blocks are kept for another engine
_PATIENCE = 3.0  # seconds that another engine waits for blocks that are on their way to host memory
_MOST_LEASES = 32  # at a time: each has a connection and the descriptors of a peer's memory
_MOST_FILES = 128  # descriptors of a peer's memory


class Extra(NamedTuple):
    """A setting of kv_connector_extra_config.

    allows: whether it may have a value.
    remedy: what to give, for people.
    """

    allows: Callable[[Any], bool]
    remedy: str


class _Asked(NamedTuple):
    """A request whose contents another engine may have. wanted: somebody has computed them for it."""

    answer: Future[PeerLease | None]
    wanted: bool


class _Load(NamedTuple):
    """A load that the ranks have ended. answer: what was lost meanwhile, None: nobody knows."""

    request: str
    keys: Sequence[Key]
    success: Sequence[bool]
    seconds: float
    answer: Future[set[Key] | None]


class PeerConnector(KVConnector):
    """One setting of kv_connector_extra_config, which need not be given:

    keep_seconds: how long the blocks of a request are kept for the engine that goes on with it.

    extra: the settings of a class.
    one_host: all ranks of an engine must be on one host.
    """

    extra: ClassVar[Mapping[str, Extra]] = {
        "keep_seconds": Extra(lambda value: is_number(value) and value > 0, "a number of seconds")
    }
    one_host: ClassVar[bool] = False

    def __init__(self, setup: ConnectorSetup) -> None:
        super().__init__(setup)
        extra = self.config.kv_connector_extra_config
        self._keep, self._ask_others = float(extra.get("keep_seconds", _KEEP)), bool(extra.get("ask_others", False))
        self._exchange = CacheExchange(setup.cache)
        self._entries = SharedEntries({kind: pool.host for kind, pool in setup.pools.items()})
        self._threads = ThreadPoolExecutor(8, "peers")
        self._asked = dict[str, _Asked]()  # by request
        self._leases = dict[str, PeerLease]()
        self._where = dict[Key, str]()  # the request whose lease has it
        self._loading = dict[int, str]()  # by ticket
        self._checking = list[_Load]()
        answers = [answer.value for answer in setup.executor.ask(HandshakeMetadata())]
        if self.one_host and len({host for host, _ in answers}) > 1:
            raise ConfigError(
                f"kv_transfer_config: kv_connector is {self.config.kv_connector!r:.80}: the engine's ranks are on "
                "several hosts; use ranks of one, or another connector"
            )
        ranks = [metadata for _, metadata in answers]
        secret = hashlib.sha256(b"kv transfer" + setup.cache.hasher.fingerprint).digest()
        self._own = PeerIdentity(setup.identity, secret, len(ranks))
        self.address, listener = self.listen()
        self._server = PeerServer(
            listener, self.address, self._own, ranks, self.descriptors(ranks), self._entries, _PATIENCE
        )

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        for name, value in config.kv_connector_extra_config.items():
            if name not in cls.extra or not cls.extra[name].allows(value):
                known = f"{cls.__name__} has {', '.join(cls.extra)}"
                remedy = f"give {cls.extra[name].remedy}" if name in cls.extra else known
                raise ConfigError(f"kv_transfer_config: {name} in kv_connector_extra_config is {value!r:.80}: {remedy}")

    # How engines meet

    @abstractmethod
    def listen(self) -> tuple[Address, socket.socket]:
        """The address of this engine, and the socket that it listens on."""

    @abstractmethod
    def named(self, params: Mapping[str, Any]) -> Address:
        """The engine that kv_transfer_params name. A client may have written nonsense."""

    @abstractmethod
    def connect(self, called: Address, timeout: float) -> socket.socket:
        """A connection to an engine. Called in threads. Raises OSError when it is not there."""

    def others(self) -> list[Address]:
        """All other engines that this one finds by itself."""
        return []

    def descriptors(self, ranks: Sequence[Mapping[str, Any]]) -> list[int]:
        """Descriptors that other engines get, of the ``files`` of all ranks."""
        return []

    # Of a request that another engine goes on with

    @property
    def writes(self) -> bool:  # type: ignore[override]
        """An engine for prompts copies all that it computes at once; others only what another engine wants."""
        return self.config.is_producer and not self.config.is_consumer

    def request_finished(self, request: ConnectorRequest) -> dict[str, Any] | None:
        if not (self.config.is_producer and request.kv_transfer_params.get("do_remote_decode")):
            return None
        keys = [(group, digest) for group, digest, _ in self._exchange.export(request.engine_request)]
        there, missing = self._entries.keep(request.request_id, keys, self._keep)
        for key in there:
            self.pool_of(key).host.pin([key])
        for key in missing:
            self.pool_of(key).copy_soon(key)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.address.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [],
            "remote_host": self.address.host or self.config.kv_ip,
            "remote_port": self.address.port or self.config.kv_port,
            "tp_size": self._own.ranks,
        }

    def offer(self, entries: Entries) -> Sequence[Key]:
        return self._entries.offered(entries)

    def written(self) -> Sequence[Key]:
        return self._entries.let_go()

    # Of a request that another engine has begun

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        id, params = request.request_id, request.kv_transfer_params
        wanted = bool(params.get("do_remote_prefill"))
        if not self.config.is_consumer or not (wanted or self._ask_others):
            return 0, False
        if request.num_transferable_tokens <= num_computed_tokens:
            return 0, False
        if (asked := self._asked.get(id)) is None:
            if len(self._asked) + len(self._leases) >= _MOST_LEASES:
                return None, True
            engines = [self.named(params)] if wanted else self.others()
            name = str(params.get("remote_request_id") or "")
            answer = self._threads.submit(self._find, engines, name, list(request.keys), wanted)
            self._asked[id] = _Asked(answer, wanted)
            return None, True
        if not asked.answer.done():
            return None, True
        del self._asked[id]
        try:
            lease = asked.answer.result()
        except PeerError as failure:
            self._fail(id, str(failure))
            return 0, False
        if lease is None or not lease.entries:
            if lease is not None:
                self._release(lease)
            if wanted:
                self._fail(id, f"engine {str(params.get('remote_engine_id'))!r:.80} has none of its blocks any more")
            return 0, False
        self._leases[id] = lease
        self._where.update(dict.fromkeys(lease.entries, id))
        return len(lease.entries) * self.setup.cache.block_size, True

    def _find(self, engines: Sequence[Address], request: str, keys: list[Key], wanted: bool) -> PeerLease | None:
        """The lease of the engine that has the most. Raises PeerError where the one that is wanted gives nothing."""
        best: PeerLease | None = None
        for engine in engines:
            try:
                lease = PeerLease(engine, self.connect, self._own, request, keys, _PATIENCE, _MOST_FILES)
            except PeerError:
                if wanted:
                    raise
                continue
            worse = lease
            if best is None or len(lease.entries) > len(best.entries):
                best, worse = lease, best
            if worse is not None:
                worse.close()
        return best

    def _fail(self, id: str, why: str) -> None:
        _log.warning("request %s: %s", id, why)
        if self.config.kv_load_failure_policy == "fail":
            self.failed.append(FailedLoad(id, f"its blocks did not come, and kv_load_failure_policy is fail: {why}"))

    def forget(self, request_id: str) -> None:
        if (asked := self._asked.pop(request_id, None)) is not None:
            asked.answer.add_done_callback(_close)
        if request_id not in self._loading.values() and request_id not in {load.request for load in self._checking}:
            self._end(request_id)

    def _end(self, id: str) -> None:
        """A request needs its lease no more."""
        if (lease := self._leases.pop(id, None)) is not None:
            for key in lease.entries:
                if self._where.get(key) == id:
                    del self._where[key]
            self._release(lease)

    def _release(self, lease: PeerLease) -> None:
        self._threads.submit(lease.close)

    def has(self, key: Key) -> bool:
        return key in self._where

    def fetch(self, entries: Entries) -> None:
        shares: dict[str, list[tuple[Key, int]]] = {}
        for key, entry in entries:
            shares.setdefault(self._where[key], []).append((key, entry))
        for id, share in shares.items():
            lease = self._leases[id]
            numbers = [lease.entries[key] for key, _ in share]
            metadata = {"ranks": lease.ranks, "entries": numbers}
            self._loading[self.start_load(share, metadata)] = id

    def load_ended(self, ticket: int, keys: Sequence[Key], success: Sequence[bool], seconds: float) -> None:
        id = self._loading.pop(ticket)
        answer = self._threads.submit(self._leases[id].lost)
        self._checking.append(_Load(id, keys, success, seconds, answer))

    def fetched(self) -> Sequence[Fetched]:
        found = list(super().fetched())
        for load in [load for load in self._checking if load.answer.done()]:
            self._checking.remove(load)
            lost = load.answer.result()
            there = {
                key: ok and lost is not None and key not in lost
                for key, ok in zip(load.keys, load.success, strict=True)
            }
            if not all(there.values()):
                why = "is gone" if lost is None else "had other use for their memory" if lost else "could not be read"
                self._fail(load.request, f"engine {self._leases[load.request].engine!r:.80} {why}")
            self._end(load.request)
            found.append(Fetched(there, load.seconds))
        return found

    def reset(self) -> None:
        for id in [id for id in self._leases if id not in self._loading.values()]:
            if id not in {load.request for load in self._checking}:
                self._end(id)

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._asked or self._checking)

    def close(self) -> None:
        self._server.close()
        for id in list(self._asked):
            self.forget(id)
        for lease in self._leases.values():
            lease.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()


def _close(answer: Future[PeerLease | None]) -> None:
    """The request that asked is gone."""
    if not answer.cancelled() and answer.exception() is None and (lease := answer.result()) is not None:
        lease.close()
