"""RequestState and RequestTable: the requests in the engine; of those that run, what a step needs as arrays by slot.

No policy and no cache. Loops over requests are for those that come or go; everything else reads the arrays.
"""

from __future__ import annotations

import bisect

import numpy as np

from graphllm.engine.requests.request import EngineRequest

_STOPS = 4  # rows the table of stop tokens begins with


class RequestState:
    """A request in the engine.

    key: its place in the order; smaller goes first.
    slot: -1 while it waits.
    drafts: tokens that are expected after all known ones.
    draft_tokens, accepted_tokens: drafts verified so far, and how many of them became part of the output.
    digests: of its full blocks.
    scored: prompt positions that steps were planned to score.
    cached_tokens: prompt tokens that the prefix cache gave when it was first admitted; -1 before.
    adapter_entry: entry of its adapter on the device while it runs.
    scheduled: time when it was first admitted, in seconds; 0 before, and without a clock.
    item_starts: while it runs, the first row of each of its items in the item cache; -1 for an item that the prefix
        cache made unnecessary.
    """

    __slots__ = (
        "accepted_tokens", "adapter_entry", "cached_tokens", "digests", "draft_tokens", "drafts", "error",
        "finish_reason", "item_starts", "key", "mistake", "output", "preemptions", "request", "scheduled", "scored",
        "slot", "stop_reason",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, key: tuple[int, int]) -> None:
        self.request, self.key, self.slot = request, key, -1
        self.output: list[int] = []
        self.drafts: list[int] = []
        self.digests: list[bytes] = []
        self.item_starts: list[int] = []
        self.scored = self.preemptions = self.draft_tokens = self.accepted_tokens = 0
        self.cached_tokens, self.adapter_entry = -1, 0
        self.scheduled = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.mistake = False

    def __lt__(self, other: RequestState) -> bool:
        return self.key < other.key

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.request.prompt) + len(self.output)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are wanted that no step was planned for."""
        return self.request.params.prompt_logprobs is not None and self.scored < len(self.request.prompt) - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """The known ids at those positions: prompt and output."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + self.output[max(0, start - len(prompt)) : end - len(prompt)]


class RequestTable:
    """Columns [max_num_seqs] by slot, int32 unless said.

    num_tokens: known tokens.
    num_computed_tokens: tokens computed in all planned steps; the next token to compute has this position.
    num_in_flight: tokens sampled in planned steps that have no result yet. Both counts assume that all drafts in flight
        are right.
    num_unsure: by how much both counts may be too high at most.
    last_token: the newest known token.
    limit: tokens of prompt and output at most.
    stoppable: position from which on a stop token ends the request.
    num_drafts: drafts that the host has proposed.
    num_made: drafts that the device makes after the last step planned for the slot.
    run: length of the match that the next guess rests on, see `MatchLengths`.
    sampled_at: number of the last step that samples for it, where several steps are in flight.
    epoch: changes whenever a slot gets another owner or loses it.
    scoring [bool]: prompt log-probabilities are wanted.
    verifiable [bool]: several tokens of it may be sampled before the host has seen them.
    adapter_id: entry of its adapter in the tables; 0 for none.
    temperature [float32], seed [int64]: of its draws.
    seen_start, seen_length: rows of the item that all of its tokens see; 0 and 0 without one.
    """

    def __init__(self, max_num_seqs: int) -> None:
        def column(kind: type = np.int32) -> np.ndarray:
            return np.zeros(max_num_seqs, dtype=kind)

        self._counts = np.zeros((9, max_num_seqs), dtype=np.int32)  # zero without a request
        self.num_tokens, self.num_computed_tokens, self.num_in_flight, self.num_unsure = self._counts[:4]
        self.num_drafts, self.num_made, self.run, self.num_prompt_tokens, self.limit = self._counts[4:]
        self.last_token, self.epoch, self.adapter_id, self.stoppable = column(), column(), column(), column()
        self.seen_start, self.seen_length = column(), column()
        self.sampled_at, self.temperature, self.seed = column(np.int64), column(np.float32), column(np.int64)
        self.scoring, self.verifiable = column(bool), column(bool)
        self._stops = np.full((_STOPS, max_num_seqs), -1, dtype=np.int32)
        self.by_slot: list[RequestState | None] = [None] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.running: list[RequestState] = []  # in order
        self._order: np.ndarray | None = None  # their slots, when they are known

    @property
    def order(self) -> np.ndarray:
        """The slots of running requests, in their order."""
        if self._order is None:
            self._order = np.array([state.slot for state in self.running], dtype=np.int32)
        return self._order

    @property
    def has_free_slot(self) -> bool:
        """Whether one more request can run."""
        return bool(self._free_slots)

    def enter(self, state: RequestState, num_computed_tokens: int, max_len: int) -> int:
        """Give a request a slot; the slot. num_computed_tokens: its tokens that the cache has."""
        request = state.request
        slot = state.slot = self._free_slots.pop()
        self.by_slot[slot] = state
        self.epoch[slot] += 1
        self.num_tokens[slot], self.num_computed_tokens[slot] = state.num_tokens, num_computed_tokens
        self.last_token[slot] = state.output[-1] if state.output else request.prompt[-1]
        self.num_prompt_tokens[slot] = len(request.prompt)
        self.limit[slot] = min(len(request.prompt) + request.limit, max_len)
        self.stoppable[slot] = min(len(request.prompt) + request.params.min_tokens, self.limit[slot])
        self.temperature[slot], self.seed[slot] = request.params.temperature, request.seed
        self.scoring[slot] = request.params.prompt_logprobs is not None
        stops = request.stop_ids
        if len(stops) > len(self._stops):
            more = np.full((len(stops) - len(self._stops), len(self.by_slot)), -1, dtype=np.int32)
            self._stops = np.concatenate([self._stops, more])
        self._stops[:, slot] = -1
        self._stops[: len(stops), slot] = stops
        bisect.insort(self.running, state)
        self._order = None
        return slot

    def place_items(self, state: RequestState) -> None:
        """Note where the rows of the item begin that all tokens of a running request see."""
        placed = zip(state.request.items, state.item_starts, strict=True)
        seen = ((start, item.length) for item, start in placed if item.position < 0)
        self.seen_start[state.slot], self.seen_length[state.slot] = next(seen, (0, 0))

    def leave(self, state: RequestState) -> None:
        """Take a request's slot."""
        slot, state.slot = state.slot, -1
        state.drafts = []
        self._counts[:, slot] = 0
        self.scoring[slot] = self.verifiable[slot] = False
        self.by_slot[slot] = None
        self.epoch[slot] += 1
        self._free_slots.append(slot)
        self.running.remove(state)
        self._order = None

    def propose(self, state: RequestState, drafts: list[int]) -> None:
        """Remember the tokens that are expected after all known ones of a request. They are verified as far as they
        reach past those in flight, when a step has room. A hint: forgotten when one of them was wrong, or the request
        has to wait."""
        if state.slot >= 0:
            state.drafts = list(drafts)
            self.num_drafts[state.slot] = len(drafts)

    def drafts(self, slots: np.ndarray, count: int) -> np.ndarray:
        """Drafts for those slots' next step [n, count] int32, -1 for none."""
        found = np.full((len(slots), count), -1, dtype=np.int32)
        for row, slot in zip(found, slots.tolist(), strict=True):
            state = self.by_slot[slot]
            first = int(self.num_in_flight[slot])
            expected = state.drafts[first : first + count] if state is not None else []
            row[: len(expected)] = expected
        return found

    def use_drafts(self, state: RequestState, tokens: list[int]) -> None:
        """Forget drafts that became tokens, and the others if one of them was wrong."""
        rest = state.drafts[len(tokens) :] if state.drafts[: len(tokens)] == tokens else []
        self.propose(state, rest)

    def stopped(self, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which tokens [n] or [n, q] at those positions of their request end it [bool]."""
        stops, first = self._stops[:, slots], self.stoppable[slots]
        if tokens.ndim > 1:
            stops, first = stops[:, :, None], first[:, None]
        return (stops == tokens).any(axis=0) & (positions >= first)
