"""Awaiting: what requests need of a connector before they may join a step, and what it says when they end."""

from __future__ import annotations

from typing import Any

from graphllm.config.vllm.kv_transfer import PARAMS
from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.tiers.promotions import Promotions
from graphllm.engine.tiers.wanted import SNAPSHOT
from graphllm.engine.transfer.kv_connector import ConnectorRequest, KVConnector


class Awaiting(Resource):
    """Asks the connector first; what it has then comes as from every tier.

    promotions: what brings contents to the device.
    """

    def __init__(self, cache: CacheManager, connector: KVConnector, promotions: Promotions) -> None:
        self._cache, self._connector, self._promotions = cache, connector, promotions
        self._asked = dict[str, ConnectorRequest]()  # of waiting requests
        self._known = set[str]()  # waiting requests of which the connector has said what it may bring

    @property
    def unanswered(self) -> bool:
        """Whether a request waits for the connector to say what it has."""
        return len(self._asked) > len(self._known)

    def acquire(self, state: RequestState) -> bool:
        id = state.request.id
        if id not in self._known and self._cache.reads(state):
            if (request := self._asked.get(id)) is None:
                request = self._asked[id] = described(self._cache, state)
            found, _ = self._connector.get_num_new_matched_tokens(request, self._cache.lookup(state).num_tokens)
            if found is None:
                return False
            self._known.add(id)
            if found and request.kv_transfer_params:
                self._promotions.wanted_anyway.add(id)  # another engine has computed it for this one
        return self._promotions.acquire(state)

    def release(self, state: RequestState, joined: bool) -> None:
        self._promotions.release(state, joined)
        if joined:
            self.forget(state.request.id)

    def forget(self, id: str) -> None:
        """A request runs, or has ended."""
        if self._asked.pop(id, None) is not None:
            self._known.discard(id)
            self._promotions.wanted_anyway.discard(id)
            self._connector.forget(id)

    def finished(self, state: RequestState) -> dict[str, Any] | None:
        """The kv_transfer_params of the answer of a request that has its last token."""
        return self._connector.request_finished(described(self._cache, state))


def described(cache: CacheManager, state: RequestState) -> ConnectorRequest:
    """A request as connectors see it."""
    request = state.request
    given = (request.params.extra_args or {}).get(PARAMS) or {}
    return ConnectorRequest(request.id, request.prompt, given, prompt_keys(cache, state), request)


def prompt_keys(cache: CacheManager, state: RequestState) -> list[Key]:
    """Of all that the beginning of a request's prompt may be made of: its last token is always computed."""
    end = (len(state.request.prompt) - 1) // cache.boundary * cache.boundary
    cache.hasher.digest(state, end)
    size, found = cache.block_size, list[Key]()
    for group in cache.groups:
        each = group.unit // size
        found += [(group.number, digest) for digest in state.digests[each - 1 : end // size : each]]
    each = cache.boundary // size
    found += [(SNAPSHOT, d) for _ in cache.states.pools for d in state.digests[each - 1 : end // size : each]]
    return found
