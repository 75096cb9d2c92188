"""ItemRows: the rows of the item cache that running requests hold for their encoded inputs. No torch."""

from __future__ import annotations

from graphllm.config import ConfigError
from graphllm.engine.cache.item_cache import ItemCache
from graphllm.engine.requests.request import EngineRequest, Item
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.resource import Resource


class ItemRows(Resource):
    """cache: where rows lie. A request holds rows of an item if the prefix cache does not have its tokens."""

    def __init__(self, cache: ItemCache) -> None:
        self.cache = cache
        self._held: dict[str, list[str]] = {}  # content hashes, by request
        self._new: dict[str, list[tuple[Item, int]]] = {}  # by request, since the last step

    def check(self, request: EngineRequest) -> None:
        """Raise ConfigError for items of more rows than there are."""
        rows = sum({item.content_hash: item.length for item in request.items}.values())
        if rows > self.cache.rows:
            raise ConfigError(
                f"request {request.id}: its encoded inputs have {rows} rows, more than the {self.cache.rows} "
                "that the artifact holds; give fewer or smaller ones"
            )

    def hold(self, state: RequestState, num_cached: int) -> bool:
        """Hold rows."""
        items = state.request.items
        needed = [item for item in items if item.position < 0 or item.position + item.length > num_cached]
        if (placed := self.cache.acquire(needed)) is None:
            return False
        starts, new = placed
        held = self._held[state.request.id] = [item.content_hash for item in needed]
        first = dict(zip(held, starts, strict=True))
        state.item_starts = [first.get(item.content_hash, -1) for item in items]
        self._new[state.request.id] = new
        return True

    def place(self, state: RequestState, table: RequestTable) -> None:
        """Note where the item begins that all tokens see."""
        table.place_items(state)

    def release(self, state: RequestState, joined: bool) -> None:
        """Give rows back. Nothing will be encoded for a request that was in no step."""
        state.item_starts = []
        self.cache.release(self._held.pop(state.request.id, ()))
        if not joined:
            self.cache.forget(self._new.pop(state.request.id, ()))

    def encodes(self) -> list[tuple[Item, int]]:
        """Items to be encoded before the next step, with their first rows; each is returned once."""
        found, self._new = self._new, {}
        return [new for of_request in found.values() for new in of_request]
