"""ngram_drafts against a definition on plain lists, over texts that grow step by step, with rows that are rejected."""

from __future__ import annotations

import random

import pytest
import torch

from graphllm.ops.speculation.ngram_drafts import ngram_drafts


def _expected(text: list[int], count: int, smallest: int, largest: int, window: int) -> tuple[list[int], int]:
    """What followed the latest of the longest runs that equal the end of the text, within its last tokens, and how many
    tokens are the same there."""
    n = len(text)
    for size in range(min(largest, n - 1), smallest - 1, -1):
        for start in range(n - size - 1, max(n - window, 0) - 1, -1):
            if text[start : start + size] == text[n - size :]:
                guess: list[int] = []
                for i in range(count):
                    guess.append((text + guess)[start + size + i])
                seen, end = text[max(n - window, 0) :], start + size - max(n - window, 0)
                return guess, next((i for i in range(16) if i >= end or seen[end - 1 - i] != text[-1 - i]), 16)
    return [-1] * count, 0


@pytest.mark.parametrize(("name", "trials"), [("reference", 60), ("cpu", 400), ("triton_ngram_drafts", 8)])
def test_growing_texts(name: str, trials: int) -> None:
    run = ngram_drafts.reference if name == "reference" else ngram_drafts.impls[name].fn
    rng = random.Random(len(name))
    found = longer = 0
    for _ in range(trials):
        length, count, largest = rng.randint(12, 40), rng.randint(1, 4), rng.randint(1, 4)
        smallest = rng.randint(1, largest)
        history, drafts = (torch.zeros(3, n, dtype=torch.int32) for n in (length, count))
        text: list[int] = []
        for step in range(rng.randint(1, 30)):
            kept = rng.randint(1, count + 1) if step else 1
            rows = count + 1 if step else 1
            sampled = [rng.randrange(4) for _ in range(rows)]
            positions = [len(text) + i for i in range(rows)]
            text += sampled[:kept]
            newest = [1 if i == kept - 1 else 2 for i in range(rows)]
            rows_of = {"tokens_R": sampled, "positions_R": positions, "slots_R": [1] * rows, "newest_R": newest}
            given = {n: torch.tensor(each, dtype=torch.int32) for n, each in rows_of.items()}
            runs = run(**given, history_NL=history, drafts_NK=drafts, smallest=smallest, largest=largest)
            guess, same = _expected(text, count, smallest, largest, length - count)
            assert drafts[1].tolist() == guess, text
            assert runs.tolist() == [same if i == kept - 1 else 0 for i in range(rows)], text
            found, longer = found + (guess[0] >= 0), longer + (same > largest)
    assert found > 3 * trials
    assert longer > trials // 2
