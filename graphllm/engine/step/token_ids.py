"""The token ids of a step, as far as the host knows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphllm.engine.requests.request_table import RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerOutput


def token_ids(output: SchedulerOutput, requests: RequestTable, ends: np.ndarray, T: int) -> np.ndarray:
    """[T] int32. ends [n]: the end of each entry's tokens.

    The newest token of a sequence is looked up by slot; prompts are read from the request, and so are drafts. Drafts
    that lie on the device, and a newest token that is in flight, are -(slot + 1)."""
    slots = output.slots
    if np.count_nonzero(output.fed) == len(slots):  # all in flight
        if len(slots) == T:
            return -(slots + 1)
        if output.verified == len(slots) and output.drafts is None:
            return np.repeat(-(slots + 1), output.query_len)
    newest = np.where(output.fed, -(slots + 1), requests.last_token[slots])
    ids, v = np.empty(T, dtype=np.int32), output.verified
    at_newest = output.fed | (output.starts == requests.num_tokens[slots] - 1)
    simple = at_newest & (output.counts == 1)
    ids[ends[simple] - 1] = newest[simple]
    if v:
        # Zero stands for a draft that there is not.
        drafts = -(slots[:v, None] + 1) if output.drafts is None else output.drafts.clip(min=0)
        verified = ids[: v * output.query_len].reshape(v, -1)
        verified[:, 0], verified[:, 1:] = newest[:v], drafts
        simple[:v] = True
    for i in np.flatnonzero(~simple):
        start, count, end = int(output.starts[i]), int(output.counts[i]), int(ends[i])
        ids[end - count : end] = output.requests[i].tokens(start, start + count)
    return ids


def history(prompt: Sequence[int], output: Sequence[int], length: int) -> np.ndarray:
    """The last ``length`` tokens, as `ngram_drafts` wants them: the one at position p at p % length."""
    known = len(prompt) + len(output)
    last = [*prompt[max(0, known - length) :], *output[-length:]][-length:]
    return np.roll(np.array(last, dtype=np.int32), (known - len(last)) % length if len(last) == length else 0)
