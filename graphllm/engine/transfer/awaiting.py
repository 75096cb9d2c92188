"""Awaiting: what requests need of a connector before they may join a step, and what it says when they end."""

from __future__ import annotations

from typing import Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.config.vllm.kv_transfer import PARAMS
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.tiers.promotions import Promotions
from graphllm.engine.transfer.kv_connector import ConnectorRequest, KVConnector


class _Asked(NamedTuple):
    """A waiting request. num_computed_tokens: that the device had when the connector was asked first."""

    request: ConnectorRequest
    num_computed_tokens: int


class Awaiting(Resource):
    """Asks the connector first; what it has then comes as from every tier.

    promotions: what brings contents to the device.
    """

    def __init__(self, cache: CacheManager, connector: KVConnector, promotions: Promotions) -> None:
        self._cache, self._connector, self._promotions = cache, connector, promotions
        self._asked = dict[str, _Asked]()
        self._known = set[str]()  # waiting requests of which the connector has said what it may bring

    def check(self, request: EngineRequest) -> None:
        params = (request.params.extra_args or {}).get(PARAMS)
        if params is not None and not isinstance(params, dict):
            raise ConfigError(f"{PARAMS} is {params!r:.80}: give an object")

    @property
    def unanswered(self) -> bool:
        """Whether a request waits for the connector to say what it has."""
        return len(self._asked) > len(self._known)

    def acquire(self, state: RequestState) -> bool:
        id = state.request.id
        # One that was preempted has had it, and a sibling shares what the first of them gets.
        asks = not (id in self._known or state.preemptions or state.request.fork_of) and self._cache.reads(state)
        if asks:
            if (asked := self._asked.get(id)) is None:
                found = self._cache.lookup(state).num_tokens
                asked = self._asked[id] = _Asked(ConnectorRequest(self._cache, state), found)
            tokens, _ = self._connector.get_num_new_matched_tokens(*asked)
            if tokens is None:
                return False
            self._known.add(id)
            if tokens and asked.request.kv_transfer_params:
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
        return self._connector.request_finished(ConnectorRequest(self._cache, state))
