"""The tasks the embedded model is trained and measured on: small functions, each making a chat and its one answer.

A question has exactly one answer here, whatever its phrasing, so a trained model is sure of every token and its
greedy text does not depend on a backend's rounding. Held-out questions are chosen by a hash of what is asked, not by a
stored list: training skips them, evaluation asks only them. Of a sum the pair of numbers is hashed, so a held-out sum
was never seen in any phrasing; of a fact the whole question is, so the fact was seen, but not asked that way.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random

from bench.training.tasks import calls, dialogue, knowledge, numbers, words  # noqa: F401  (importing registers)
from bench.training.tasks.base import SYSTEM_PROMPTS, TASKS, Message, Sample, Schema, in_split, is_held_out

__all__ = ["TASKS", "Message", "Sample", "Schema", "draw", "in_split", "is_held_out", "mixture"]


def draw(rng: Random, name: str, held_out: bool = False) -> Sample:
    """A random sample from one side of the split, now and then under a system prompt that changes nothing."""
    while not in_split(sample := TASKS[name].make(rng), held_out):
        pass
    sample.task = name
    if rng.random() < 0.1 and sample.messages[0]["role"] != "system":
        sample.messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *sample.messages]
    return sample


def mixture(rng: Random) -> Iterator[Sample]:
    """The endless stream of training samples."""
    names, weights = list(TASKS), list(accumulate(entry.weight for entry in TASKS.values()))
    while True:
        yield draw(rng, rng.choices(names, cum_weights=weights)[0])
