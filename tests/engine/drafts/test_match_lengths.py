"""GuessRuns and what Acceptance makes of it, against guesses that are played one by one with known odds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from graphllm.engine.drafts.acceptance import Acceptance
from graphllm.engine.drafts.match_lengths import ENDED, MatchLengths

GOES_ON = [0.0, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95]  # by length of the run
BEGINS = [0.6, 0.25, 0.1, 0.05]


def _next(rng: random.Random, run: int) -> tuple[bool, int]:
    """Whether a guess that rests on such a run is right, and the run behind the next token."""
    if rng.random() < GOES_ON[min(run, 8)]:
        return True, run + 1
    return False, rng.choices(range(4), BEGINS)[0]


def _right(rng: random.Random, run: int, ahead: int, count: int) -> int:
    """Of ``count`` drafts that are made when a run of that length has seen so many more tokens, how many are right. The
    step in flight ends with the first wrong guess, where drafts begin anew."""
    for _ in range(ahead):
        good, run = _next(rng, run)
        if not good:
            break
    right = 0
    while right < count and run:
        good, run = _next(rng, run)
        if not good:
            break
        right += 1
    return right


def _learned(rng: random.Random, sequences: int, tokens: int, verifying: float) -> MatchLengths:
    """From texts of which steps give one token each, or verify three drafts."""
    learner, runs = MatchLengths(), np.zeros(sequences, dtype=np.int32)
    for _ in range(tokens // sequences):
        if rng.random() < verifying:
            right, missed, now = np.zeros(sequences, np.int32), np.zeros(sequences, bool), runs.copy()
            for s in range(sequences):
                for place in range(4):  # three drafts and the token behind them, which nobody has guessed
                    if place == 3 or not now[s]:
                        now[s] = _next(rng, int(now[s]))[1]
                        break
                    good, now[s] = _next(rng, int(now[s]))
                    if not good:
                        missed[s] = True
                        break
                    right[s] += 1
            missed |= runs == 0
            learner.verified(runs, right, missed, now)
        else:
            now = np.array([_next(rng, int(r))[1] for r in runs], dtype=np.int32)
            learner.stepped(runs, now)
        runs = now
    return learner


@pytest.mark.parametrize(("sequences", "verifying"), [(1, 0.0), (1, 0.5), (40, 0.3), (300, 1.0)])
def test_what_is_expected_is_what_comes(sequences: int, verifying: float) -> None:
    """Over runs and places, on average of several engines: each remembers little."""
    rng = random.Random(sequences)
    cases = [(run, ahead) for run in (0, 1, 2, 4, 8, 13) for ahead in (0, 1, 4)]
    learners = [_learned(rng, sequences, 2000 * max(1, sequences // 20), verifying) for _ in range(12)]
    for run, ahead in cases:
        found = np.mean([learner.expected([run], [ahead], 5) for learner in learners])
        played = np.mean([_right(rng, run, ahead, 5) for _ in range(3000)])
        assert abs(found - played) < 0.2 + 0.12 * played, (run, ahead, found, played)


def test_a_batch_is_the_mean_of_its_sequences() -> None:
    learner = _learned(random.Random(1), 4, 400, 0.2)
    runs, ahead = [0, 3, 8, 20, 1], [1, 4, 1, 4, 0]
    alone = [learner.expected([r], [a], 3) for r, a in zip(runs, ahead, strict=True)]
    assert learner.expected(runs, ahead, 3) == pytest.approx(sum(alone) / 5)
    assert alone == sorted(alone, key=alone.index)
    assert alone[2] > alone[1] > alone[0] >= 0


def test_nothing_goes_on_behind_the_end() -> None:
    """Texts that say the same, of one more token each, and end."""
    learner = MatchLengths()
    for _ in range(200):
        learner.stepped(np.array([2]), np.array([3]))
        learner.stepped(np.array([3]), np.array([ENDED]))
    assert learner.expected([2], [0], 5) == pytest.approx(1, abs=0.1)
    assert learner.expected([3], [0], 5) < 0.1
    assert learner.expected([0], [1], 5) < 0.1  # what a text ends with is not where a guess begins


def _timed(most: int = 5, cost: float = 1.5) -> Acceptance:
    acceptance = Acceptance(most)
    for _ in range(40):
        acceptance.timed(1, 1, 1.0)
        acceptance.timed(6, 1, cost)
    return acceptance


def test_a_text_that_repeats_itself_is_verified_at_once_and_no_other() -> None:
    acceptance = _timed()
    assert acceptance.best(1, [6], runs=[4], ahead=[1]) == 6  # before anything is learned
    assert all(acceptance.best(1, [6], runs=[0], ahead=[1]) == 1 for _ in range(100))
    for _ in range(64):  # runs of one token, and guesses that are wrong
        acceptance.runs.stepped(np.array([1]), np.array([1]))
    assert all(acceptance.best(1, [6], runs=[1], ahead=[1]) == 1 for _ in range(100))
    assert acceptance.best(1, [6], runs=[4], ahead=[1]) == 6


def test_many_sequences_are_verified_for_those_that_repeat_themselves() -> None:
    acceptance = Acceptance(5)
    for _ in range(40):
        acceptance.timed(1, 32, 1.0)
        acceptance.timed(6, 32, 1.5)
    chosen = [acceptance.best(32, [6], runs=[8] * n + [0] * (32 - n), ahead=[1] * 32) for n in range(33)]
    assert chosen[0] == 1
    assert chosen[32] == 6
    assert chosen == sorted(chosen)
    gained = acceptance.runs.expected([8], [1], 5)
    assert chosen.index(6) == next(n for n in range(33) if 1 + gained * n / 32 > 1.5)


def test_what_verifying_takes_is_tried_again_with_good_guesses_only() -> None:
    acceptance = _timed(cost=6.0)
    assert [acceptance.best(1, [6], runs=[6], ahead=[1]) for _ in range(64)].count(6) == 4
    assert [acceptance.best(1, [6], runs=[0], ahead=[1]) for _ in range(64)].count(6) == 0
    for _ in range(12):
        acceptance.timed(6, 1, 1.5)
    assert acceptance.best(1, [6], runs=[6], ahead=[1]) == 6


def test_as_many_drafts_as_the_run_is_good_for() -> None:
    acceptance = Acceptance(7)
    for _ in range(40):
        for q in (1, 2, 4, 8):
            acceptance.timed(q, 1, 1 + 0.3 * (q - 1))
    for _ in range(100):
        acceptance.runs.stepped(np.array([1]), np.array([2]))
        acceptance.runs.stepped(np.array([2]), np.array([0]))
        acceptance.runs.stepped(np.array([8]), np.array([9]))
    assert acceptance.best(1, [2, 4, 8], runs=[8], ahead=[1]) == 8
    assert acceptance.best(1, [2, 4, 8], runs=[1], ahead=[0]) == 2
