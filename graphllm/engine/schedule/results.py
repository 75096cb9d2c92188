"""What a step's tokens do to the running requests: who gets how many, who ends and why."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerOutput


class Commit(NamedTuple):
    """The requests that got tokens or ended, and the tokens of each. events: which of them began or ended."""

    requests: list[RequestState]
    tokens: list[list[int]]
    events: list[int]

    def followed_by(self, other: Commit) -> Commit:
        """Both."""
        events = [*self.events, *(len(self.requests) + i for i in other.events)]
        return Commit([*self.requests, *other.requests], [*self.tokens, *other.tokens], events)


def take_step(
    t: RequestTable, output: SchedulerOutput, tokens: np.ndarray, num_kept: np.ndarray | None, drafted: np.ndarray,
    live: np.ndarray,
) -> tuple[Commit, list[tuple[RequestState, str]]]:  # fmt: skip
    """What all entries of a step get; also who ends, and why. See `take` and `take_verified`."""
    v, n = output.verified, len(output.slots)
    if not v:
        return take(t, output, tokens, live)
    assert num_kept is not None
    first, row = output if v == n else output.part(slice(v)), v * output.query_len
    commit, ends = take_verified(t, first, tokens[:row], num_kept[:v], drafted, live[:v])
    if v < n:
        others, their_ends = take(t, output.part(slice(v, None)), tokens[row:], live[v:])
        commit, ends = commit.followed_by(others), ends + their_ends
    return commit, ends


def take(
    t: RequestTable, output: SchedulerOutput, tokens: np.ndarray, live: np.ndarray
) -> tuple[Commit, list[tuple[RequestState, str]]]:
    """One token for each entry that samples; also who ends, and why. Entries without a token become not live: nothing
    of what such a step has computed is kept."""
    got = output.samples & live
    if len(tokens) == len(output.slots) == np.count_nonzero(got):
        at, chosen, new, requests = np.arange(len(tokens)), output.slots, tokens, list(output.requests)
    else:
        at = np.flatnonzero(got)
        chosen, new = output.slots[at], tokens[(np.cumsum(output.rows) - 1)[at]]
        requests = [output.requests[i] for i in at.tolist()]
    known = t.num_tokens[chosen] + 1
    t.num_in_flight[chosen] -= 1
    t.num_tokens[chosen] = known
    t.last_token[chosen] = new
    failed, stopped = new < 0, t.stopped(chosen, new, known - 1)
    ended = stopped | failed | (known >= t.limit[chosen])
    events = (ended | (known == t.num_prompt_tokens[chosen] + 1)).nonzero()[0].tolist()
    given = new.tolist()
    for state, token in zip(requests, given, strict=True):
        state.output.append(token)
    news = [[token] for token in given]
    ends: list[tuple[RequestState, str]] = []
    for i in events:
        if not ended[i]:
            continue
        state, beyond = requests[i], known[i] > t.limit[chosen[i]]
        if failed[i] or beyond:
            state.output.pop()
            news[i] = []
            live[at[i]] = bool(beyond)  # what a step without a token has computed is nothing to keep
        elif stopped[i]:
            state.stop_reason = given[i]
        ends.append((state, "stop" if beyond else "error" if failed[i] else "stop" if stopped[i] else "length"))
    if np.count_nonzero(t.num_drafts):
        for state, token in zip(requests, given, strict=True):
            if state.drafts:
                t.use_drafts(state, [token])
    return Commit(requests, news, events), ends


def take_verified(
    t: RequestTable,
    output: SchedulerOutput,
    tokens: np.ndarray,
    num_kept: np.ndarray,
    drafted: np.ndarray,
    live: np.ndarray,
) -> tuple[Commit, list[tuple[RequestState, str]]]:
    """Of a step that verifies, the tokens kept of each entry, up to a stop token or its limit, where it ends. What was
    counted for rejected tokens is taken back. drafted: how many drafts each entry had."""
    query_len, ahead = output.query_len, output.ahead
    at = np.flatnonzero(live)
    slots, kept, new = output.slots[at], num_kept[at], tokens.reshape(-1, query_len)[at]
    known, limit, n = t.num_tokens[slots], t.limit[slots], np.arange(len(at))
    places = np.arange(query_len)
    failed = new < 0
    stopped = t.stopped(slots, new, known[:, None] + places)
    ending = (stopped | failed) & (places < kept[:, None])
    last, taken, events = kept - 1, kept, list[int]()
    if np.count_nonzero(ending) or np.count_nonzero(known + kept >= limit):
        ending |= (known[:, None] + places + 1 >= limit[:, None]) & (places < kept[:, None])
        ended = ending.any(axis=1)
        last = np.where(ended, ending.argmax(axis=1), last)
        taken = last + 1 - failed[n, last]
        events = np.flatnonzero(ended).tolist()
    t.num_in_flight[slots] -= ahead
    t.num_unsure[slots] -= ahead - 1
    t.num_computed_tokens[slots] -= ahead - kept
    t.num_tokens[slots] += taken
    t.last_token[slots] = new[n, last]
    requests = [output.requests[i] for i in at.tolist()]
    news = [row[:k] for row, k in zip(new.tolist(), taken.tolist(), strict=True)]
    for state, given, count in zip(requests, news, drafted[at].tolist(), strict=True):
        state.output += given
        state.draft_tokens += count
        state.accepted_tokens += min(count, max(len(given) - 1, 0))
        if state.drafts:
            t.use_drafts(state, given)
    ends: list[tuple[RequestState, str]] = []
    for i in events:
        reason = "error" if failed[i, last[i]] else "stop" if stopped[i, last[i]] else "length"
        if reason == "stop":
            requests[i].stop_reason = news[i][-1]
        live[at[i]] = reason != "error"
        ends.append((requests[i], reason))
    return Commit(requests, news, events), ends
