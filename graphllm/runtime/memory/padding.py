"""Which bucket takes a batch, and the sizes to which it is padded so that few are bound or captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphllm.config import Bucket, ConfigError

# Sizes that are captured on a GPU, relative to which a batch is padded: at most 25 % waste, few graphs.
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, *range(256, 1025, 64))
MIXED_CAPTURED = 512  # tokens up to which mixed steps are captured too: longer ones hide their launches
_MIXED_STEP = 64  # longer mixed steps are padded to a multiple of this many tokens


class Size(NamedTuple):
    """What a step is padded to: its bucket, and T, S and R."""

    bucket: Bucket
    T: int
    S: int
    R: int

    @property
    def symbols(self) -> dict[str, int]:
        """By name."""
        return {"T": self.T, "S": self.S, "R": self.R}


def pick(
    buckets: Sequence[Bucket], tokens: int, sequences: int, rows: int, query_len: int, most_rows: int, exact: bool,
    longest_query: int = 1,
) -> Size:  # fmt: skip
    """The bucket for a batch, and what it is padded to.

    rows: rows that are sampled from.
    query_len: tokens of each sequence where all have equally many and all are sampled from, else 0.
    most_rows: sequences of a step at most, and its rows where none verifies ``longest_query`` tokens.
    exact: on a CPU, where nothing is captured and so nothing need be padded.
    longest_query: tokens of a sequence that verifies at most.

    Raises ConfigError when no bucket takes the tokens.
    """
    bucket = _find(buckets, tokens, sequences, query_len)
    if bucket.kind == "decode":
        S = sequences if exact else _padded(sequences, bucket.hi)
        return Size(bucket, bucket.query_len * S, S, bucket.query_len * S)
    if exact:
        T = max(bucket.lo, tokens)
        return Size(bucket, T, _dynamic(bucket, sequences), _dynamic(bucket, rows))
    T = max(bucket.lo, _padded(tokens, min(bucket.hi, MIXED_CAPTURED)))
    if tokens > MIXED_CAPTURED:
        T = min(bucket.hi, -(-tokens // _MIXED_STEP) * _MIXED_STEP)
    S = _dynamic(bucket, _padded(sequences, most_rows))
    most = bucket.limits(most_rows, longest_query)["R"]
    # As many rows as sequences in most steps, so that few sizes are captured.
    return Size(bucket, T, S, S if rows <= S else _dynamic(bucket, _padded(rows, most)))


def _find(buckets: Sequence[Bucket], tokens: int, sequences: int, query_len: int) -> Bucket:
    """The first bucket that takes the batch, of those with a fixed number of tokens a sequence if it may."""
    for bucket in buckets:
        fits = bucket.kind == "decode" and bucket.query_len == query_len and bucket.lo <= sequences <= bucket.hi
        if fits:
            return bucket
    for bucket in buckets:
        if bucket.kind == "mixed" and tokens <= bucket.hi:
            return bucket
    raise ConfigError(f"no bucket of the artifact takes {tokens} tokens; compile with larger --buckets")


def is_captured(bucket: Bucket, tokens: int) -> bool:
    """Whether a step of that size is captured on a GPU."""
    return tokens <= (GRAPH_SIZES[-1] if bucket.kind == "decode" else MIXED_CAPTURED)


def _dynamic(bucket: Bucket, rows: int) -> int:
    """A dynamic size is at least 2, but in a bucket that begins with 1."""
    return max(min(bucket.lo, 2), rows)


def _padded(size: int, limit: int) -> int:
    """The next size that is captured, but for the limit; sizes beyond the last one stay."""
    return next((min(limit, g) for g in GRAPH_SIZES if g >= size), size)
