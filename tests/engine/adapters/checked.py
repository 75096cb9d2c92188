"""What adapters give, compared with PEFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def check_logprobs(
    expected_of: Callable[[Sequence[int], str | None], Tensor],
    outputs: Sequence[Any],
    adapters: Sequence[str | None],
    tolerance: float,
) -> None:
    """Greedy tokens are the likeliest ones, and all log-probabilities as expected.

    expected_of: of tokens and an adapter, the log-probabilities [T, V] after each token.
    outputs: with 20 log-probabilities of each token, and one of each prompt token.
    """
    for output, adapter in zip(outputs, adapters, strict=True):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        assert completion.finish_reason == "length", completion.error
        expected = expected_of([*prompt, *completion.token_ids], adapter)
        for i, token in enumerate(completion.token_ids):
            row = expected[len(prompt) - 1 + i]
            assert row.max() - row[token] < tolerance
            found = completion.logprobs[i]
            assert len(found) == 20
            assert max(abs(one.logprob - float(row[id])) for id, one in found.items()) < tolerance
        for i in range(1, len(prompt)):
            logprob = output.prompt_logprobs[i][prompt[i]].logprob
            assert abs(logprob - float(expected[i - 1, prompt[i]])) < tolerance
