"""Each rule of the scheduler by itself, over a simulated device that checks the rest (`simulation`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphllm.config import ConfigError
from graphllm.engine.requests.request import QueueFullError
from graphllm.engine.schedule.adapter_table import fail_waiting
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from tests.engine.simulation import VOCAB, Entry, Simulation, alone, continuation, item, layout, request

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_num_rows=16, max_len=64, block_size=4)


def simulation(pages: int = 100, windows: tuple[int, ...] = (0,), caching: bool = True, **fields: Any) -> Simulation:
    """fields: of the limits and of the simulation."""
    limits = {name: fields.pop(name) for name in LIMITS._fields if name in fields}
    return Simulation(LIMITS._replace(**limits), pages, windows, caching, **fields)


def prompt(length: int, first: int = 0) -> list[int]:
    """No two pages of it are equal; those of another ``first`` neither."""
    return [1000 * first + i for i in range(length)]


def brief(entries: list[Entry]) -> list[tuple[str, int, int]]:
    return [(e.id, e.start, e.count) for e in entries]


def computed(plans: list[list[Entry]], id: str) -> list[tuple[int, int]]:
    """(start, count) of a request's entries."""
    return [(e.start, e.count) for plan in plans for e in plan if e.id == id]


# Budgets and order


def test_prompts_share_a_step_and_the_next_goes_on_where_it_ended() -> None:
    sim = simulation()
    for i in range(4):
        sim.add(request(f"{i}", prompt(6, i)))
    assert brief(sim.step()) == [("0", 0, 6), ("1", 0, 6), ("2", 0, 4)]
    assert brief(sim.step()) == [("0", 6, 1), ("1", 6, 1), ("2", 4, 2), ("3", 0, 6)]
    assert brief(sim.step()) == [("0", 7, 1), ("1", 7, 1), ("2", 6, 1), ("3", 6, 1)]
    sim.run()


def test_a_slot_is_given_on_as_soon_as_its_request_ended() -> None:
    sim = simulation(max_num_seqs=2)
    sim.add(request("long", prompt(3), 9))
    sim.add(request("short", prompt(3, 1), 2))
    sim.add(request("next", prompt(3, 2), 2))
    plans = sim.run()
    assert [i for i, p in enumerate(plans) if "short" in [e.id for e in p]] == [0, 1]
    # The second token of "short" is known when the third step was planned, and the fourth takes its place.
    assert [i for i, p in enumerate(plans) if "next" in [e.id for e in p]] == [3, 4]
    assert [i for i, p in enumerate(plans) if "long" in [e.id for e in p]] == list(range(9))


def test_rows_of_a_step() -> None:
    sim = simulation(max_num_rows=2)
    for i in range(4):
        sim.add(request(f"{i}", prompt(3, i), 3))
    plans = sim.run()
    assert [sum(e.rows for e in p) for p in plans if p] == [2] * 6


def test_a_long_prompt_does_not_hold_up_streams() -> None:
    sim = simulation(max_num_batched_tokens=8, max_len=200)
    for i in range(3):
        sim.add(request(f"{i}", prompt(2, i), 60))
    sim.step()
    sim.step()
    sim.add(request("long", prompt(100, 9), 2))
    for start in range(0, 100, 5):
        plan = sim.step()
        assert [(e.id, e.count, e.fed) for e in plan[:3]] == [(f"{i}", 1, True) for i in range(3)]
        assert brief(plan[3:]) == [("long", start, 5)]
    assert brief(sim.step()[3:]) == [("long", 100, 1)]
    sim.run()


def test_long_prefill_token_threshold() -> None:
    """A part of it in a step, so that other prompts have a place beside it."""
    sim = simulation(long_prefill_token_threshold=6)
    sim.add(request("long", prompt(20)))
    sim.add(request("other", prompt(20, 1)))
    sim.add(request("short", prompt(3, 2)))
    assert brief(sim.step()) == [("long", 0, 6), ("other", 0, 6), ("short", 0, 3)]
    assert brief(sim.step()) == [("short", 3, 1), ("long", 6, 6), ("other", 6, 6)]
    sim.run()


def test_first_come_first_served() -> None:
    """Priorities are nothing then. One whose pages are not free is not overtaken."""
    sim = simulation(pages=9, max_num_seqs=3)
    sim.add(request("a", prompt(12), 8, priority=5))
    sim.add(request("big", prompt(22, 1), 4, priority=3))
    sim.add(request("small", prompt(2, 2), 2, priority=0))
    order = list(dict.fromkeys(e.id for plan in sim.run() for e in plan))
    assert order == ["a", "big", "small"]
    assert sim.scheduler.preemptions == 0


def test_priorities() -> None:
    sim = simulation(max_num_seqs=1, policy="priority")
    sim.add(request("now", prompt(3)))
    sim.step()
    for id, priority in (("c", 2), ("a", -1), ("d", 2), ("b", 0)):
        sim.add(request(id, prompt(3), 2, priority=priority))
    order = list(dict.fromkeys(e.id for plan in sim.run() for e in plan))
    assert order == ["now", "a", "b", "c", "d"]


# Preemption


def _preempted(sim: Simulation, ids: str) -> list[str]:
    """Requests in the order in which they are preempted."""
    seen: dict[str, int] = dict.fromkeys(ids, 0)
    order = []
    while sim.unfinished:
        sim.step()
        for id, sequence in sim.alive.items():
            if sequence.preemptions > seen[id]:
                assert sequence.preemptions == seen[id] + 1
                order.append(id)
                seen[id] += 1
    return order


def test_the_latest_is_preempted_and_comes_back_in_its_place() -> None:
    sim = simulation(pages=10, max_num_seqs=3, caching=False)
    for i, id in enumerate("abc"):
        sim.add(request(id, prompt(8, i), 20))
    sim.step()
    sim.step()
    sim.add(request("d", prompt(8, 3), 20))
    order = _preempted(sim, "abcd")
    assert order[0] == "c"
    assert "a" not in order
    assert list(sim.reason) == ["a", "b", "c", "d"]


def test_the_lowest_priority_is_preempted() -> None:
    sim = simulation(pages=10, max_num_seqs=3, caching=False, policy="priority")
    for i, (id, priority) in enumerate((("a", 7), ("b", 0), ("c", 1))):
        sim.add(request(id, prompt(8, i), 20, priority=priority))
    order = _preempted(sim, "abc")
    assert order[0] == "a"
    assert "b" not in order
    assert list(sim.reason) == ["b", "c", "a"]


def test_what_was_in_flight_for_a_preempted_request_is_discarded() -> None:
    """It is computed again: the tokens are the same, and none comes twice (`simulation` compares)."""
    sim = simulation(pages=8, max_num_seqs=2, caching=False)
    sim.add(request("a", prompt(10), 16))
    sim.add(request("b", prompt(10, 1), 10))
    plans = [sim.step()]
    while not sim.scheduler.preemptions:
        before = len(sim.output["b"])
        plans.append(sim.step())
    assert plans[-2][1].id == "b"  # in flight when it was preempted
    assert len(sim.output["b"]) == before
    known = 10 + len(sim.output["b"])
    plans = sim.run()
    assert computed(plans, "b")[0] == (0, known)


# Limits and ends


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_no_step_is_spent_behind_the_limit(limit: int) -> None:
    sim = simulation()
    sim.add(request("a", prompt(5), limit))
    plans = sim.run()
    assert computed(plans, "a") == [(0, 5)] + [(5 + i, 1) for i in range(limit - 1)]
    assert sim.reason == {"a": "length"}


def test_max_len_is_a_limit_too() -> None:
    """Though the front does not let such a request through."""
    scheduler = Scheduler(LIMITS._replace(max_len=8), layout((0,), 20, (4,)))
    scheduler.add(request("a", prompt(5), 30))
    count = 0
    while (plan := scheduler.next()) is not None:
        count += len(scheduler.commit(plan, np.zeros(1, dtype=np.int32)).tokens)
    assert (count, scheduler.unfinished) == (3, 0)


def test_an_aborted_request_leaves_nothing() -> None:
    sim = simulation()
    for i, id in enumerate("abc"):
        sim.add(request(id, prompt(6, i), 8))
    sim.step()
    sim.step()
    known = len(sim.output["b"])
    sim.abort("b")
    sim.step()  # what was in flight for it comes now
    assert len(sim.output["b"]) == known
    sim.add(request("waits", prompt(6, 4)))
    sim.abort("waits", "a")
    plans = sim.run()
    assert {e.id for plan in plans for e in plan} == {"c"}
    assert sim.reason == {"b": "abort", "waits": "abort", "a": "abort", "c": "length"}
    assert sim.scheduler.abort(["unknown", "a"]) == []


def test_an_id_may_come_again_while_its_last_step_is_in_flight() -> None:
    scheduler = Scheduler(LIMITS._replace(max_num_seqs=1), layout((0,), 20, (4,)))
    scheduler.add(request("a", [1, 2, 3]))
    first = scheduler.next()
    assert first is not None
    scheduler.abort(["a"])
    scheduler.add(request("a", [4, 5]))
    second = scheduler.next()
    assert second is not None
    assert scheduler.commit(first, np.array([7], dtype=np.int32)).requests == []
    assert scheduler.commit(second, np.array([8], dtype=np.int32)).tokens == [[8]]


def _with_first(token: int, **fields: Any) -> int:
    """A seed with which the third token is the first of its kind."""
    for seed in range(1000):
        tokens = continuation(request("x", prompt(5), seed=seed, **fields), prompt(5), 3)
        if tokens[2] == token and token not in tokens[:2]:
            return seed
    raise AssertionError


@pytest.mark.parametrize("stops", [[3], [1, 3], [90, 91, 92, 93, 94, 95, 3]])
def test_stop_tokens(stops: list[int]) -> None:
    """Also more of them than other requests have; the next in the slot is not stopped by them."""
    sim = simulation(max_num_seqs=2)
    seed = next(
        s for s in range(1000)
        if (t := continuation(request("x", prompt(5), seed=s), prompt(5), 3))[2] == 3 and not set(t[:2]) & set(stops)
    )  # fmt: skip
    sim.add(request("other", prompt(5, 1), 30, stop_ids=[99]))
    sim.step()
    sim.add(request("a", prompt(5), 20, seed=seed, stop_ids=stops))
    sim.add(request("after", prompt(5), 12, seed=seed))
    sim.run()
    assert (len(sim.output["a"]), sim.reason["a"], sim.alive["a"].stop_reason) == (3, "stop", 3)
    assert (len(sim.output["after"]), sim.reason["after"]) == (12, "length")
    assert (len(sim.output["other"]), sim.reason["other"]) == (30, "length")


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    sim = simulation()
    sim.add(request("a", prompt(5), 3, seed=_with_first(3), stop_ids=[3]))
    sim.run()
    assert sim.reason["a"] == "stop"


@pytest.mark.parametrize("index", [0, 2])
def test_no_token_can_be_chosen(index: int) -> None:
    """It ends with an error and what there was; others go on."""
    sim = simulation()
    sim.add(request("bad", prompt(9), 6), error_at=index)
    sim.add(request("good", prompt(5, 1), 6))
    sim.run()
    assert (len(sim.output["bad"]), sim.reason["bad"], sim.alive["bad"].stop_reason) == (index, "error", None)
    assert sim.reason["good"] == "length"


def test_the_caller_ends_a_request() -> None:
    """One that runs goes away; one that ended has another reason then."""
    sim = simulation()
    sim.add(request("a", prompt(9), 6))
    sim.step()
    sim.step()
    sequence = sim.alive["a"]
    sim.scheduler.end(sequence, "stop")
    assert (sequence.finish_reason, sim.scheduler.unfinished, sim.pool.free_blocks) == ("stop", 0, 99)
    sim.scheduler.fail(sequence, "why")
    assert (sequence.finish_reason, sequence.error) == ("error", "why")


# The queue, and what cannot run


def test_the_queue_is_bounded() -> None:
    sim = simulation(max_num_seqs=1, max_num_queued_reqs=2)
    sim.add(request("a", prompt(3)))
    sim.step()
    sim.add(request("b", prompt(3)))
    sim.add(request("c", prompt(3)))
    with pytest.raises(QueueFullError, match="2 requests are waiting; send the request again later"):
        sim.scheduler.add(request("d", prompt(3)))
    assert (sim.scheduler.running, sim.scheduler.waiting, sim.scheduler.unfinished) == (1, 2, 3)
    sim.abort("b")
    sim.add(request("d", prompt(3)))
    sim.run()


def test_ids_are_unique() -> None:
    sim = simulation()
    sim.add(request("a", prompt(3)))
    with pytest.raises(ConfigError, match="request_id: 'a' is already running"):
        sim.scheduler.check(request("a", prompt(3)))
    sim.run()
    sim.scheduler.check(request("a", prompt(3)))


@pytest.mark.parametrize(
    ("windows", "capacity"),
    [
        ((0,), 32),  # 8 pages of 4
        ((0, 0), 16),
        ((4,), 64),  # 4 pages are always enough: max_len counts
        ((0, 6), 16),  # up to 5 pages behind and in a step of 8; from 4 pages on both groups need as many
    ],
)
def test_capacity(windows: tuple[int, ...], capacity: int) -> None:
    """What fits runs to its end alone, in steps of any size; what is longer is refused."""
    sim = simulation(pages=9, windows=windows, max_num_batched_tokens=8)
    assert sim.scheduler.capacity == capacity
    for i, length in enumerate((1, capacity // 2, capacity - 1)):
        sim.add(request(f"{i}", prompt(length, i), capacity - length))
        sim.run()
    assert sim.scheduler.preemptions == 0
    if capacity < LIMITS.max_len:
        with pytest.raises(ConfigError, match=f"5 prompt tokens and up to {capacity - 4} of output are more than the "):
            sim.scheduler.add(request("x", prompt(5), capacity - 4))


# The prefix cache


def _cached(sim: Simulation, id: str, ids: list[int], **fields: Any) -> int:
    """Tokens that the cache gives a request, which is run to its end."""
    sim.add(request(id, ids, **fields))
    plans = sim.run()
    assert sim.alive[id].cached_tokens == computed(plans, id)[0][0]
    return sim.alive[id].cached_tokens


def test_full_pages_are_found_and_one_token_is_computed() -> None:
    sim = simulation()
    lengths = (11, 11, 12, 8, 9, 4, 5, 3)
    assert [_cached(sim, f"{i}", prompt(n)) for i, n in enumerate(lengths)] == [0, 8, 8, 4, 8, 0, 4, 0]
    other = prompt(11)
    other[5] = 999
    assert _cached(sim, "other", other) == 4
    assert sim.scheduler.admission.prefix_queries == sum(lengths) + 11
    assert sim.scheduler.admission.prefix_hits == 8 + 8 + 4 + 8 + 4 + 4


def test_what_a_request_generated_is_found() -> None:
    sim = simulation()
    sim.add(request("a", prompt(6), 11))
    sim.run()  # 16 of its 17 tokens are computed
    assert _cached(sim, "b", [*prompt(6), *sim.output["a"], 1, 2, 3]) == 16


def test_pages_of_a_running_request_are_shared() -> None:
    """Not the one that it still writes."""
    sim = simulation()
    sim.add(request("a", prompt(10), 30))
    sim.step()
    sim.step()
    sim.add(request("b", prompt(10), 30, seed=1))
    assert brief(sim.step()) == [("a", 11, 1), ("b", 8, 2)]
    tables = sim.scheduler.cache.tables[0][[sim.alive[i].slot for i in "ab"]]
    assert (tables[0, :2] == tables[1, :2]).all()
    assert tables[0, 2] != tables[1, 2]
    assert [sim.pool.references[p] for p in tables[0, :3]] == [2, 2, 1]
    sim.run()


def test_who_is_not_to_read_the_cache_fills_it() -> None:
    sim = simulation()
    assert _cached(sim, "a", prompt(9), unread=True) == 0
    assert _cached(sim, "b", prompt(9), unread=True) == 0
    assert _cached(sim, "c", prompt(9)) == 8


def test_salts() -> None:
    sim = simulation()
    found = [_cached(sim, f"{i}", prompt(9), cache_salt=s) for i, s in enumerate(["", "x", "y", "x", ""])]
    assert found == [0, 0, 0, 8, 8]


def test_reset_and_off() -> None:
    sim = simulation()
    assert _cached(sim, "a", prompt(9)) == 0
    assert sim.pool.reset_cache()
    assert _cached(sim, "b", prompt(9)) == 0
    assert _cached(sim, "c", prompt(9)) == 8
    sim = simulation(caching=False)
    assert [_cached(sim, i, prompt(9)) for i in "ab"] == [0, 0]


def test_no_reset_while_a_sequence_has_states() -> None:
    """It has no blocks, but would leave snapshots of what was there before the reset."""
    sim = simulation(windows=(), recurrent=True, num_snapshots=4)
    sim.add(request("a", prompt(3), 6))
    sim.step()
    assert not sim.scheduler.cache.reset()
    sim.run()
    assert sim.scheduler.cache.reset()


def test_the_end_of_what_is_cached_is_evicted_first() -> None:
    sim = simulation(pages=10)
    _cached(sim, "a", prompt(25), limit=1)  # 7 pages, 6 of them full
    _cached(sim, "b", prompt(18, 1), limit=1)  # 5 pages: 3 are empty, and two are taken
    assert _cached(sim, "c", prompt(25), limit=1) == 16


def test_a_window_needs_only_its_pages() -> None:
    """Fewer pages than the prompt has: what lies behind the window was given back, and its end is found yet."""
    sim = simulation(pages=8, windows=(4,), block_size=2, max_num_batched_tokens=4)
    assert _cached(sim, "a", prompt(21), limit=1) == 0
    assert _cached(sim, "b", prompt(21), limit=1) == 20


@pytest.mark.parametrize("earlier", [True, False])
def test_groups_agree_on_what_is_found(earlier: bool) -> None:
    """The group that sees all loses page 3. A window of 4 then needs page 2, which only an earlier request kept."""
    sim = simulation(pages=40, windows=(0, 4))
    if earlier:
        _cached(sim, "earlier", prompt(13), limit=1)
    assert _cached(sim, "a", prompt(18), limit=1) == (12 if earlier else 0)
    lost = sim.pool.find(0, sim.alive["a"].digests[3])
    taken = [0]
    while taken[-1] != lost:
        taken.append(sim.pool.allocate())
    sim.pool.release(taken[1:])
    assert _cached(sim, "b", prompt(18), limit=1) == (12 if earlier else 0)


# Windows


@pytest.mark.parametrize("windows", [(4,), (0, 6), (7, 3)])
def test_pages_behind_the_window_are_given_back(windows: tuple[int, ...]) -> None:
    sim = simulation(windows=windows, block_size=2, max_num_batched_tokens=6)
    sim.add(request("a", prompt(19), 30))
    while sim.unfinished:
        for entry in sim.step():
            tables = [t[sim.alive["a"].slot] for t in sim.scheduler.cache.tables]
            for table, window in zip(tables, windows, strict=True):
                first = max(0, entry.start - window + 1) // 2 if window else 0
                assert not table[:first].any()
                assert table[first : (entry.start + entry.count + 1) // 2].all()
    assert len(sim.output["a"]) == 30


# Siblings


def _siblings(sim: Simulation, count: int, ids: list[int], limit: int = 6, **fields: Any) -> None:
    for i in range(count):
        sim.add(request(f"{i}", ids, limit, seed=i, fork_of="0" if i else "", **fields))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [10, 8, 3])
def test_siblings_share_their_prompt(length: int, caching: bool) -> None:
    """It is computed once but for its last token, and each has a copy of the page that this one lies in."""
    sim = simulation(caching=caching)
    _siblings(sim, 3, prompt(length))
    plans = [sim.step(), sim.step()]
    assert brief(plans[0]) == [("0", 0, length)]
    assert brief(plans[1]) == [("0", length, 1), ("1", length - 1, 1), ("2", length - 1, 1)]
    tables = sim.scheduler.cache.tables[0][[sim.alive[i].slot for i in "012"]]
    last = (length - 1) // 4
    assert (tables[:, :last] == tables[0, :last]).all()
    assert len(set(tables[:, last])) == 3
    assert [pair[0] for pair in sim.copied] == [tables[0, last]] * 2
    assert {pair[1] for pair in sim.copied} == set(tables[1:, last])
    sim.run()
    assert len(sim.copied) == 2
    assert sim.scheduler.preemptions == 0


def test_siblings_are_given_no_more_pages_than_they_need() -> None:
    """11 pages: 2 shared, and 3 of its own for each."""
    sim = simulation(pages=12, caching=False)
    _siblings(sim, 3, prompt(10), 9)
    sim.run()
    assert sim.scheduler.preemptions == 0


def test_a_late_sibling_shares_too() -> None:
    """No slot was free before; its leader has long gone on."""
    sim = simulation(max_num_seqs=2)
    _siblings(sim, 1, prompt(10), 20)
    sim.add(request("other", prompt(3), 8))
    sim.add(request("1", prompt(10), seed=1, fork_of="0"))
    plans = sim.run()
    assert computed(plans, "1")[0] == (9, 1)


@pytest.mark.parametrize("caching", [True, False])
def test_the_leader_is_gone(caching: bool) -> None:
    """Before anything was computed, or after: siblings compute what the cache does not have."""
    sim = simulation(caching=caching)
    _siblings(sim, 3, prompt(10))
    sim.abort("0")
    plans = sim.run()
    assert computed(plans, "1")[0] == (0, 10)
    sim = simulation(max_num_seqs=1, caching=caching)
    _siblings(sim, 2, prompt(10))
    plans = sim.run()
    assert computed(plans, "1")[0] == ((8, 2) if caching else (0, 10))


def test_the_leader_was_preempted() -> None:
    """Its sibling waits until the prompt was computed again."""
    sim = simulation(pages=14, max_num_seqs=2, max_num_batched_tokens=6, caching=False, policy="priority")
    _siblings(sim, 1, prompt(20), 12, priority=1)
    sim.add(request("first", prompt(8, 1), 24))
    while "0" not in sim.alive or not sim.alive["0"].preemptions:
        sim.step()
    sim.add(request("1", prompt(20), 4, seed=1, fork_of="0", priority=1))
    plans = sim.run()
    again = [(e.id, e.start) for plan in plans for e in plan if e.id in "01"]
    assert ("0", 0) in again
    assert again.index(("1", 19)) > again.index(("0", 18))


@pytest.mark.parametrize("windows", [(6,), (0, 6)])
def test_the_leaders_window_has_moved_on(windows: tuple[int, ...]) -> None:
    """What its prompt's last token saw is not held any more: the late sibling computes it."""
    sim = simulation(windows=windows, max_num_seqs=2, caching=False)
    _siblings(sim, 1, prompt(10), 30)
    sim.add(request("other", prompt(3), 16))
    sim.add(request("1", prompt(10), seed=1, fork_of="0"))
    plans = sim.run()
    assert computed(plans, "1")[0] == (0, 10)


# prompt_logprobs


def test_prompt_rows_are_limited() -> None:
    sim = simulation(max_num_rows=5)
    sim.add(request("stream", prompt(3, 1), 12))
    sim.step()
    sim.step()
    sim.add(request("a", prompt(11), 2, scored=True))
    plans = sim.run()
    assert computed(plans, "a") == [(0, 4), (4, 4), (8, 3), (11, 1)]
    assert [e.rows for plan in plans for e in plan if e.id == "a"] == [4, 4, 3, 1]
    assert sim.scored["a"] == list(range(10))


def test_as_many_rows_as_entries_though_not_one_each() -> None:
    """Two rows for a prompt's last chunk, none for the chunk beside it."""
    sim = simulation(max_num_batched_tokens=4, max_num_rows=4, long_prefill_token_threshold=2, caching=False)
    sim.add(request("a", prompt(6), 1, scored=True))
    sim.add(request("b", prompt(9, 1), 1))
    plans = sim.run()
    assert [(e.id, e.rows) for e in plans[2]] == [("a", 2), ("b", 0)]


def test_scores_need_the_whole_prompt() -> None:
    """It is not taken from the cache, but others take it from there."""
    sim = simulation()
    assert _cached(sim, "a", prompt(10)) == 0
    assert _cached(sim, "b", prompt(10), scored=True) == 0
    assert sim.scored["b"] == list(range(9))
    assert _cached(sim, "c", prompt(10)) == 8


def test_a_prompt_preempted_in_its_middle_is_not_scored_twice() -> None:
    sim = simulation(pages=11, max_num_seqs=2, max_num_batched_tokens=5, caching=False)
    sim.add(request("first", prompt(3, 1), 29))
    while len(sim.output["first"]) < 8:
        sim.step()
    sim.add(request("a", prompt(25), 1, scored=True))
    preempted = False
    while sim.unfinished:
        scored = len(sim.scored.get("a", []))
        sim.step()
        preempted |= "a" in sim.alive and sim.alive["a"].preemptions > 0 and 0 < scored < 24
    assert preempted
    assert sim.scored["a"] == list(range(24))


def test_a_sibling_that_scores_goes_on_alone() -> None:
    """It began its prompt itself, the leader's window having moved on, and was preempted in the middle, as was the
    leader later. Now the leader's prompt is there again, but not the scores of the rest of it."""
    sim = simulation(
        pages=32, windows=(0, 4), caching=False, block_size=2, max_num_seqs=3, max_num_batched_tokens=4,
        policy="priority",
        long_prefill_token_threshold=2,
    )  # fmt: skip
    sim.add(request("first", prompt(2, 1), 40))
    sim.add(request("0", prompt(12), 24, priority=1))
    sim.add(request("other", prompt(2, 2), 8))
    sim.add(request("1", prompt(12), 2, seed=1, priority=1, fork_of="0", scored=True))
    plans = sim.run()
    assert [sim.alive[i].preemptions for i in "01"] == [1, 1]
    assert [start for start, _ in computed(plans, "1")].count(0) == 2
    assert sim.scored["1"] == list(range(11))


# Verification


def _drafting(sim: Simulation, limit: int = 20, length: int = 5, **fields: Any) -> list[int]:
    """A request "a" with two known tokens and one in flight; the tokens behind the known ones."""
    wire = sim.add(request("a", prompt(length), limit, **fields))
    sim.step()
    sim.step()
    sim.step()
    assert len(sim.output["a"]) == 2
    return continuation(wire, [*wire.prompt, *sim.output["a"]], 12)


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_drafts_are_kept_as_far_as_they_are_right(right: int) -> None:
    """The first of those expected is in flight. The next step is planned before it is known what is kept."""
    sim = simulation(query_lens=(5,))
    true = _drafting(sim)
    sim.scheduler.requests.propose(sim.alive["a"], [*true[: right + 1], *[VOCAB + 1] * (4 - right)])
    assert sim.step() == [Entry("a", 7, 5, 5, True, True)]
    assert sim.step() == [Entry("a", 12, 1, 1, True, True)]
    assert sim.output["a"][3:] == true[1 : right + 2]
    assert sim.verified == [(5, right + 1)]
    assert brief(sim.step()) == [("a", 9 + right, 1)]
    sim.run()


def test_drafts_that_are_known_to_be_wrong_are_not_verified() -> None:
    sim = simulation(query_lens=(2, 3, 4))
    _drafting(sim)
    sim.scheduler.requests.propose(sim.alive["a"], [VOCAB + 1] * 4)
    assert brief(sim.step()) == [("a", 7, 4)]
    assert brief(sim.step()) == [("a", 11, 1)]
    assert sim.alive["a"].drafts == []
    sim.run()
    assert sim.verified == [(4, 1)]


def test_other_requests_go_on_beside_drafts() -> None:
    """Those without drafts are padded, also beside a prompt."""
    sim = simulation(query_lens=(3,))
    for i, id in enumerate("ab"):
        sim.add(request(id, prompt(5, i), 20))
    for i in range(9):
        if i in (3, 6):
            wire = sim.requests["a"].wire
            sim.scheduler.requests.propose(sim.alive["a"], continuation(wire, [*wire.prompt, *sim.output["a"]], 3))
        if i == 6:
            sim.add(request("c", prompt(5, 2), 4))
        entries = sim.step()
        assert ("b", 5 if i == 0 else 3 if i in (3, 6) else 1) in [(e.id, e.count) for e in entries]
    assert sim.verified[0] == (3, 3)
    sim.run()


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_drafts_on_the_device(windows: tuple[int, ...], right: int) -> None:
    """Every step verifies, and is planned while the one before may still reject; the last tokens come singly."""
    sim = simulation(windows=windows, query_lens=(4,), device_drafts=True, max_num_rows=99, max_num_batched_tokens=99)
    sim.right = right
    for i, id in enumerate("abc"):
        sim.add(request(id, prompt(5, i), 30, seed=i))
    plans = sim.run()
    assert len([p for p in plans if p and {e.count for e in p} == {4}]) > 4
    assert all(len(sim.output[id]) == 30 for id in "abc")
    assert len({kept for _, kept in sim.verified}) > 1


@pytest.mark.parametrize("right", [1, 3, 5])
def test_drafts_of_another_block_leave_no_wrong_block_behind(right: int) -> None:
    """Rejected drafts fill a block that nobody may find; the blocks are used again by what follows."""
    sim = simulation(pages=8, query_lens=(7,))
    true = _drafting(sim, 14)
    sim.scheduler.requests.propose(sim.alive["a"], [*true[: right + 1], *[VOCAB + 1] * (6 - right)])
    assert brief(sim.step()) == [("a", 7, 7)]
    tables = sim.scheduler.cache.tables[0]
    held = int((tables > 0).sum())
    assert held == 4  # up to position 13
    while (tables > 0).any():
        sim.step()
        assert int((tables > 0).sum()) in (0, 4, 5)
    assert _cached(sim, "b", [*prompt(5), *sim.output["a"]], limit=1) == 16


def test_a_stop_token_among_kept_drafts() -> None:
    seed = next(
        s for s in range(1000)
        if (t := continuation(request("x", prompt(5), seed=s), prompt(5), 6)).count(3) == 1 and t[4] == 3
    )  # fmt: skip
    sim = simulation(query_lens=(4,))
    true = _drafting(sim, seed=seed, stop_ids=[3])
    sim.scheduler.requests.propose(sim.alive["a"], true[:4])
    sim.step()
    sim.step()
    assert (len(sim.output["a"]), sim.reason["a"], sim.alive["a"].stop_reason) == (5, "stop", 3)
    assert sim.pool.free_blocks == 99


@pytest.mark.parametrize("limit", [5, 6, 8])
def test_drafts_end_at_the_limit(limit: int) -> None:
    """Those behind it are not computed: 1 of the output is sampled at any rate."""
    sim = simulation(max_len=5 + limit, query_lens=(2, 3, 4, 5, 6, 7, 8, 9))
    true = _drafting(sim, limit)
    sim.scheduler.requests.propose(sim.alive["a"], true[:9])
    assert brief(sim.step()) == [("a", 7, limit - 3)]
    sim.step()
    assert (len(sim.output["a"]), sim.reason["a"]) == (limit, "length")


def test_no_room_for_a_compiled_length() -> None:
    sim = simulation(max_len=13, query_lens=(8,))
    true = _drafting(sim, 8)
    sim.scheduler.requests.propose(sim.alive["a"], true[:6])
    plans = sim.run()
    assert {count for _, count in computed(plans, "a")} == {1}


def test_an_error_among_kept_drafts() -> None:
    sim = simulation(query_lens=(4,))
    wire = sim.add(request("a", prompt(5), 20), error_at=5)
    for _ in range(3):
        sim.step()
    sim.scheduler.requests.propose(sim.alive["a"], continuation(wire, [*wire.prompt, *sim.output["a"]], 4))
    sim.run()
    assert (len(sim.output["a"]), sim.reason["a"]) == (5, "error")


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 6}, {"max_num_rows": 6}])
def test_drafts_are_no_more_than_a_step_takes(limits: dict[str, Any]) -> None:
    sim = simulation(**limits, query_lens=(2, 3, 4, 8))
    for i, id in enumerate("ab"):
        sim.add(request(id, prompt(3, i), 20))
    for _ in range(3):
        sim.step()
    for id in "ab":
        wire = sim.requests[id].wire
        sim.scheduler.requests.propose(sim.alive[id], continuation(wire, [*wire.prompt, *sim.output[id]], 4))
    assert [e.count for e in sim.step()] == [3, 3]
    sim.run()
    assert sim.verified == [(3, 3)] * 2


def test_one_whose_tokens_must_be_seen_has_no_drafts() -> None:
    sim = simulation(query_lens=(4,), device_drafts=True)
    sim.add(request("a", prompt(3), 20))
    sim.step()
    sim.scheduler.requests.verifiable[sim.alive["a"].slot] = False
    sim.run()
    assert sim.verified == []


# Groups of unlike block sizes, and none


@pytest.mark.parametrize("windows", [(0, 0), (0, 6), (5, 0)])
def test_hits_end_at_the_largest_block(windows: tuple[int, ...]) -> None:
    sim = simulation(windows=windows, block_sizes=(4, 16))
    assert _cached(sim, "a", prompt(40)) == 0
    assert _cached(sim, "b", prompt(40)) == 32
    assert _cached(sim, "c", prompt(32)) == 16
    assert [t.shape[1] for t in sim.scheduler.cache.tables] == [16, 4]


def test_a_model_without_block_states() -> None:
    sim = simulation(pages=0, windows=())
    for i in range(6):
        sim.add(request(f"{i}", prompt(9), i))
    sim.run()
    assert sim.reason["0"] == "stop"
    assert sim.output["0"] == []
    assert [len(sim.output[f"{i}"]) for i in range(1, 6)] == [1, 2, 3, 4, 5]


# Recurrent states


@pytest.mark.parametrize("windows", [(), (0,), (6,)])
def test_snapshots(windows: tuple[int, ...]) -> None:
    """A chunk ends at the last boundary before the prompt's end, and a hit where there is a snapshot."""
    sim = simulation(windows=windows, recurrent=True, num_snapshots=6)
    sim.add(request("a", prompt(14)))
    plans = sim.run()
    assert computed(plans, "a")[:2] == [(0, 12), (12, 2)]
    assert _cached(sim, "b", prompt(14)) == 12
    assert _cached(sim, "c", prompt(11)) == 0  # there is no snapshot at 8 before it
    assert _cached(sim, "d", prompt(10)) == 8
    assert _cached(sim, "e", [*prompt(14), 5, 6, 7, 8]) == 12


@pytest.mark.parametrize("windows", [(), (0,)])
def test_snapshots_from_inside_of_chunks(windows: tuple[int, ...]) -> None:
    """A prompt's last chunk ends at its end where a step can export the state at a boundary inside of it."""
    sim = simulation(windows=windows, recurrent=True, num_snapshots=30, exports=(8, 9), border=4)
    sim.add(request("a", prompt(14)))
    assert computed(sim.run(), "a")[0] == (0, 14)
    assert _cached(sim, "b", [*prompt(14), 5, 6, 7, 8]) == 12
    sim.add(request("whole borders", prompt(12, 1)))
    assert computed(sim.run(), "whole borders")[0] == (0, 12)
    assert _cached(sim, "c", prompt(12, 1)) == 8
    more = {f"{i}": prompt(5, i + 2) for i in range(3)}
    for id, tokens in more.items():
        sim.add(request(id, tokens))
    plans = sim.run()
    first = {id: computed(plans, id)[0] for id in more}
    assert first == {"0": (0, 5), "1": (0, 5), "2": (0, 4)}  # two can export at a time
    assert [_cached(sim, f"again {id}", [*tokens, 1, 2]) for id, tokens in more.items()] == [4, 4, 4]


def test_windows_end_chunks_at_boundaries() -> None:
    sim = simulation(windows=(6,), recurrent=True, num_snapshots=9, exports=(8, 9), border=4)
    sim.add(request("a", prompt(14)))
    assert computed(sim.run(), "a")[:2] == [(0, 12), (12, 2)]
    assert _cached(sim, "b", [*prompt(14), 5, 6, 7, 8]) == 12


def test_a_border_that_is_no_boundary_exports_nothing() -> None:
    sim = simulation(recurrent=True, num_snapshots=9, exports=(8, 9), border=6)
    sim.add(request("a", prompt(11)))
    assert computed(sim.run(), "a")[:2] == [(0, 8), (8, 3)]
    sim.add(request("b", prompt(15, 1)))  # 12 is both
    assert computed(sim.run(), "b")[0] == (0, 15)
    assert _cached(sim, "c", prompt(15, 1)) == 12


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_a_snapshot_where_prompts_part(windows: tuple[int, ...]) -> None:
    """Behind a common beginning, without any interval: the second request that finds only its blocks takes it. A
    conversation that goes on takes none at its turns."""
    sim = simulation(windows=windows, recurrent=True, num_snapshots=9)
    common = prompt(21)
    asked = {f"{i}": [*common, *prompt(8, i + 1)] for i in range(5)}
    found = [_cached(sim, id, tokens) for id, tokens in asked.items()]
    assert found == [0, 0, 0, 20, 20]
    admission = sim.scheduler.admission
    assert (admission.prefix_hits, admission.prefix_hits_without_state) == (20 + 20, 20 + 20)  # of 3 and 4, of 1 and 2
    text = prompt(13, 77)
    for turn in range(3):
        sim.add(request(f"turn {turn}", text, 9))
        chunks = computed(sim.run(), f"turn {turn}")
        last = (len(text) - 1) // 4 * 4
        assert [start + count for start, count in chunks][:2] == [last, len(text)]
        assert (chunks[0][0] > 0) == (turn > 0)
        text = [*text, *sim.output[f"turn {turn}"], *prompt(6, turn + 90)]


def test_snapshots_at_intervals() -> None:
    """Also behind what was generated. The least recently used one is overwritten."""
    sim = simulation(recurrent=True, num_snapshots=9, snapshot_interval=7)  # every 8
    sim.add(request("a", prompt(13), 20))
    plans = sim.run()
    assert computed(plans, "a")[:3] == [(0, 8), (8, 4), (12, 1)]
    text = [*prompt(13), *sim.output["a"]]
    assert [_cached(sim, f"{n}", text[:n], limit=1) for n in (13, 12, 17, 25, 33)] == [12, 8, 16, 24, 32]
    for i in range(9):
        _cached(sim, f"x{i}", prompt(5, i + 1), limit=1)
    assert _cached(sim, "again", text[:13], limit=1) == 0


@pytest.mark.parametrize("ended", ["aborted", "without_output"])
def test_a_request_ends_at_a_boundary_where_drafts_see_the_next_token(ended: str) -> None:
    """The snapshot there is in flight, and no token follows that its digest needs. The one before is found."""
    sim = simulation(recurrent=True, num_snapshots=6, lookahead=2, next_seen=True, query_lens=(3,))
    sim.add(request("a", prompt(8), 5 if ended == "aborted" else 0))
    sim.step()
    sim.step()
    if ended == "aborted":
        sim.abort("a")
    sim.run()
    assert sim.scheduler.cache.states.idle
    assert _cached(sim, "b", prompt(10)) == 4


def test_siblings_of_a_recurrent_model_resume_at_a_snapshot() -> None:
    sim = simulation(recurrent=True, num_snapshots=3)
    _siblings(sim, 3, prompt(10))
    plans = sim.run()
    assert [computed(plans, id)[0] for id in "012"] == [(0, 8), (8, 2), (8, 2)]
    sim = simulation(recurrent=True, num_snapshots=0)
    _siblings(sim, 3, prompt(10))
    plans = sim.run()
    assert [computed(plans, id)[0][0] for id in "012"] == [0, 0, 0]


# Adapters and items


def test_adapters() -> None:
    sim = simulation(max_adapters=2)
    found = [_cached(sim, f"{i}", prompt(9), adapter=a) for i, a in enumerate([0, 1, 2, 3, 1, 0])]
    assert found == [0, 0, 0, 0, 8, 8]
    with pytest.raises(ConfigError, match="adapter '3': this artifact has no tables for adapters; compile with --ena"):
        simulation().scheduler.add(request("x", prompt(9), adapter=3))


def test_no_more_adapters_run_at_once_than_have_tables() -> None:
    sim = simulation(max_adapters=2)
    for i in range(12):
        sim.add(request(f"{i}", prompt(5), 6, adapter=i % 4))
    most = 0
    while sim.unfinished:
        sim.step()
        running = sim.scheduler.requests.running
        most = max(most, len({s.request.adapter.digest for s in running if s.request.adapter is not None}))
    assert most == 2
    assert not sim.adapters.used


def test_an_adapter_whose_requests_keep_coming_holds_up_no_other() -> None:
    """Whoever waits for an entry gets it once those that ran before have ended, and those without an adapter pass."""
    sim = simulation(max_adapters=1)
    for i in range(3):
        sim.add(request(f"a{i}", prompt(5), 6, adapter=1))
    sim.step()
    sim.step()
    sim.add(request("b", prompt(5), 6, adapter=2))
    for i in range(40):
        sim.add(request(f"c{i}", prompt(5), 6, adapter=1))
        sim.add(request(f"d{i}", prompt(3), 1))
        sim.step()
    assert sim.reason["b"] == "length"
    assert {sim.reason.get(f"d{i}") for i in range(12)} == {"length"}
    assert sim.reason["c0"] == "length"
    sim.run()


def test_an_adapter_that_cannot_be_read_ends_its_requests_only() -> None:
    sim = simulation(max_adapters=1)
    for i, adapter in enumerate([1, 2, 1, 0]):
        sim.scheduler.add(request(f"{i}", prompt(5), 2, adapter=adapter))
    assert sim.scheduler.next() is not None  # the one without
    (wanted,) = sim.adapters.wanted
    assert [s.request.id for s in fail_waiting(sim.scheduler, sim.adapters, wanted.digest, "is gone")] == ["0", "2"]
    assert sim.scheduler.unfinished == 2
    sim.scheduler.next()
    assert [a.name for a in sim.adapters.wanted] == ["2"]


def test_items_are_encoded_once() -> None:
    """By content; where the prefix cache has what stands behind them, not at all. Another image is another prefix."""
    sim = simulation(item_tokens=10)
    for i, content in enumerate("aabac"):
        found = _cached(sim, f"{i}", prompt(13), items=[item(content, 2, 5)])
        assert found == [0, 12, 0, 12, 0][i]
    assert sim.encoded == ["a", "b", "c"]
    assert _cached(sim, "other", [7, *prompt(12)], items=[item("b", 3, 5)]) == 0
    assert _cached(sim, "seen by all", prompt(13), items=[item("b", -1, 5)]) == 0
    assert sim.encoded == ["a", "b", "c"]
    assert _cached(sim, "evicted", [8, *prompt(12)], items=[item("a", 3, 5)]) == 0
    assert sim.encoded == ["a", "b", "c", "a"]


def test_a_request_waits_for_room_for_its_items() -> None:
    sim = simulation(item_tokens=10)
    sim.add(request("a", prompt(9), 6, items=[item("a", 0, 3), item("b", 4, 3)]))
    sim.add(request("b", prompt(9, 1), 6, items=[item("c", 0, 5)]))
    plans = sim.run()
    ends = max(i for i, p in enumerate(plans) if "a" in [e.id for e in p])
    assert min(i for i, p in enumerate(plans) if "b" in [e.id for e in p]) > ends
    with pytest.raises(ConfigError, match="its encoded inputs have 11 rows, more than the 10"):
        sim.scheduler.add(request("x", prompt(20), items=[item("c", 0, 11)]))


def test_items_that_are_kept_do_not_stay_in_the_way() -> None:
    """The first item is there, in the middle of the rows, and leaves no room on either side for the second."""
    sim = simulation(item_tokens=8)
    _cached(sim, "a", prompt(9), items=[item("a", 0, 3), item("b", 3, 3)])
    _cached(sim, "b", prompt(9, 1), items=[item("b", 0, 3), item("c", 3, 5)])
    assert sim.encoded == ["a", "b", "b", "c"]


# Export and import


@pytest.mark.parametrize(
    ("windows", "recurrent"), [((0,), True), ((0, 6), True), ((), True), ((0,), False), ((0, 6), False)]
)
def test_an_exported_prefix_is_found_elsewhere(windows: tuple[int, ...], recurrent: bool) -> None:
    """The second one computes the last chunk only, and its text is that of one that computes all."""
    fields = {"windows": windows, "recurrent": recurrent, "num_snapshots": 4 if recurrent else 0}
    first, second = simulation(**fields), simulation(**fields)
    first.add(request("a", prompt(21), 6))
    first.run()
    text = [*prompt(21), *first.output["a"]][:22]
    contents = first.export(request("x", text))
    assert contents
    assert second.adopt(contents) == 0
    assert second.adopt(contents) == len(contents)
    assert _cached(second, "b", text) == 20


# Models that keep nothing between steps


def test_a_running_sequence_does_not_write_over_what_was_imported() -> None:
    """The only snapshot, which it has written before."""
    first, second = simulation(recurrent=True, num_snapshots=4), simulation(recurrent=True, num_snapshots=1)
    _cached(first, "b", prompt(9, 5))
    second.add(request("a", prompt(3), 20))
    for _ in range(7):
        second.step()
    assert second.adopt(first.export(request("b", prompt(9, 5)))) == 0
    second.run()
    assert _cached(second, "b", prompt(9, 5)) == 8


def test_a_prompt_is_computed_in_one_step_where_nothing_is_kept() -> None:
    sim = simulation(windows=(), max_num_batched_tokens=16, long_prefill_token_threshold=4)
    with pytest.raises(ConfigError, match="request long: 17 prompt tokens; this model computes a prompt in one step"):
        sim.add(request("long", prompt(17), 0))
    for i in range(6):
        sim.add(request(f"{i}", prompt(9 + i, i), 0))
    steps = 0
    while sim.scheduler.unfinished:
        output = sim.scheduler.next()
        steps += output is not None
        if output is not None:
            assert (output.starts == 0).all()
            assert [len(s.request.prompt) for s in output.requests] == output.counts.tolist()
            sim.scheduler.commit(output, np.zeros(len(output.slots), dtype=np.int32))
    assert steps == 6  # no two of them fit into a step


def test_the_simulation_notices() -> None:
    """A scheduler that shares a page too many would not go unseen."""
    sim = simulation()
    sim.add(request("a", prompt(10), 20))
    sim.add(request("b", prompt(10, 1), 20))
    sim.step()
    slots = [sim.alive[i].slot for i in "ab"]
    table = sim.scheduler.cache.tables[0]
    table[slots[1], 1] = table[slots[0], 1]
    with pytest.raises(AssertionError):
        sim.step()
    assert alone(request("a", prompt(10), 20))[1] == "length"


def _conversations(count: int, turns: int, snapshots: int, **limits: Any) -> tuple[int, int]:
    """Tokens that conversations found, turn by turn and each in its turn, and tokens whose blocks were there without a
    state. They have a common beginning."""
    sim = simulation(500, recurrent=True, num_snapshots=snapshots, max_len=256, **limits)
    texts = [[*prompt(21), *prompt(8, 1 + i)] for i in range(count)]
    for turn in range(turns):
        for i, text in enumerate(texts):
            sim.add(request(f"{i} {turn}", text, 5))
            sim.run()
            text += [*sim.output[f"{i} {turn}"], *prompt(20, 100 * (turn + 1) + i)]
    admission = sim.scheduler.admission
    return admission.prefix_hits, admission.prefix_hits_without_state


def test_conversations_with_a_snapshot_each() -> None:
    """One more for the common beginning, and one that is being written: what an earlier turn left goes first."""
    found, lost = _conversations(6, 5, snapshots=6 + 2)
    assert found > 0.9 * (found + lost)
    found, lost = _conversations(6, 5, snapshots=6)
    assert found < 0.5 * (found + lost)
