"""Conversations with recurrent states: what their prompts find in the cache, of what blocks would give without states.

A snapshot is as large as the blocks of some 3,144 tokens in the shape of Qwen3-Next. Of 5 % of the cache, each
conversation of 63,000 tokens has one; shorter ones share, so not all of them may go on at a time.
"""

from __future__ import annotations

import pytest

from tests.engine.schedule.conversations import BLOCK, Device, Trace, run
from tests.tiers import thorough

# Of Qwen3-Next: 36 layers with a delta state in float32 and the last three rows of a convolution, 12 with attention.
SNAPSHOT = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
# The same in 8 bits, with a scale for each of 128 channels of a head.
ROUNDED = 36 * (32 * 128 * (128 + 4) + 3 * (2 * 16 + 32) * 128 * 2)
TOKEN = 12 * 2 * 2 * 256 * 2  # keys and values of two heads
MANY = Trace(100, 10, at_once=100, common=2000, tokens=66000)
SHORT = Trace(100, 10, at_once=7, common=2000, tokens=10500, kills=0.2)


def blocks_of(trace: Trace, count: int) -> int:
    """Blocks that hold so many of its conversations."""
    return -(-trace.common // BLOCK) + count * (-(-(trace.tokens - trace.common) // BLOCK) + 4)


def device(trace: Trace, count: int, share: float = 0.05, snapshot: int = SNAPSHOT) -> Device:
    """With a cache for so many conversations, and snapshots of so many bytes in that share of all."""
    blocks = blocks_of(trace, count)
    return Device(blocks, int(share / (1 - share) * blocks * BLOCK * TOKEN / snapshot))


@pytest.mark.parametrize(
    ("trace", "held"),
    [
        (MANY._replace(count=12, turns=4, at_once=8), 12),
        (MANY._replace(count=12, turns=4, at_once=4, kills=0.2), 8),
        thorough(MANY._replace(kills=0.1), 100),
        thorough(SHORT, 80),
    ],
    ids=["few", "few_killed_and_full", "many_killed", "short_killed_and_full"],
)
def test_most_of_what_blocks_alone_would_save_is_saved(trace: Trace, held: int) -> None:
    """At least nine tenths; and each request gets the tokens that it gets alone. held: conversations that the blocks
    have room for."""
    made = device(trace, held)
    outcome = run(trace, made)
    assert outcome.wrong == 0
    assert outcome.shortest >= 10_000
    assert outcome.found >= 0.9 * (outcome.found + outcome.lost)
    assert (outcome.killed > 0) == (trace.kills > 0)


@pytest.mark.parametrize(
    ("trace", "held"),
    [
        (SHORT._replace(count=24, turns=7, at_once=9, kills=0.0), 24),
        thorough(SHORT._replace(at_once=48, kills=0.0), 100),
        thorough(SHORT._replace(at_once=24), 80),
    ],
    ids=["few", "many", "killed_and_full"],
)
def test_snapshots_in_8_bits_serve_four_times_as_many_conversations(trace: Trace, held: int) -> None:
    """Of conversations of 10,000 tokens of which more go on than there are snapshots in float32, they save nine tenths,
    and those in float32 less."""
    found = {}
    for size in (SNAPSHOT, ROUNDED):
        outcome = run(trace, device(trace, held, snapshot=size))
        assert outcome.wrong == 0
        assert outcome.shortest >= 10_000
        found[size] = outcome.found / (outcome.found + outcome.lost)
    assert found[SNAPSHOT] < 0.7
    assert found[ROUNDED] >= 0.9


def test_states_from_inside_of_chunks_save_steps() -> None:
    """As many tokens are found, in a step less for each prompt."""
    trace, found, steps = MANY._replace(count=4, turns=4, at_once=4, tokens=12000, running=1), [], []
    for exports in (0, 4):
        made = Device(blocks_of(trace, 4), 20, exports=exports)
        outcome = run(trace, made)
        assert outcome.wrong == 0
        found.append(outcome.found)
        steps.append(outcome.steps)
    assert found[1] >= found[0] > 0
    assert steps[0] - steps[1] == 4 * 4


def test_texts_where_running_requests_take_blocks_from_each_other() -> None:
    """Four of them, and blocks for two: some are preempted and some killed, and none gets another text."""
    trace = Trace(12, 4, at_once=6, common=500, tokens=2500, answer=300, kills=0.2)
    made = Device(blocks_of(trace, 2), 6)
    outcome = run(trace, made)
    assert outcome.wrong == 0
    assert outcome.found > 0
    assert outcome.killed > 0
    assert made.scheduler.preemptions > 0


def test_what_is_lost_is_what_blocks_alone_would_save() -> None:
    """The tokens that are counted as lost are those that a model without states finds in the same requests."""
    trace = Trace(10, 4, at_once=10, common=500, tokens=2500, running=1)
    blocks = blocks_of(trace, 10)
    alone = run(trace, Device(blocks, 0))
    for snapshots in (1, 5, 20):
        outcome = run(trace, Device(blocks, snapshots))
        assert (outcome.wrong, outcome.found + outcome.lost) == (0, alone.found)


def test_answers_are_not_computed_again() -> None:
    """They are a third of these conversations. A snapshot for each, and few more: no prompt goes back to its
    beginning."""
    trace = Trace(8, 5, at_once=8, common=500, tokens=3500, answer=400)
    outcome = run(trace, Device(blocks_of(trace, 8), 8 + 4))
    assert outcome.wrong == 0
    assert outcome.found >= 0.95 * (outcome.found + outcome.lost)


@pytest.mark.parametrize(
    ("trace", "held"),
    [
        (Trace(6, 4, at_once=6, common=500, tokens=2500, answer=250), 6),
        thorough(Trace(24, 5, at_once=12, common=500, tokens=3500, answer=400, kills=0.2), 12),
    ],
    ids=["few", "killed"],
)
def test_host_memory_stands_in_for_snapshots_of_the_device(trace: Trace, held: int) -> None:
    """As many as there are running requests, and host memory for six times as many, save what many would: the old ones
    make room, and come back. What nobody is likely to want takes no room of others there."""
    blocks, found = blocks_of(trace, held), []
    for snapshots, host in ((400, 0), (trace.running, 6), (trace.running, 0)):
        outcome = run(trace, Device(blocks, snapshots, host=host))
        assert outcome.wrong == 0
        found.append(outcome.found / (outcome.found + outcome.lost))
    many, tiers, few = found
    assert tiers >= 0.98 * many
    assert few < 0.5 * many
