"""Which bucket takes a batch, and the sizes to which it is padded so that few are bound or captured."""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.config import Bucket, ConfigError

# Sizes that are captured on a GPU, relative to which a batch is padded: at most 25 % waste, few graphs.
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, *range(256, 1025, 64))
MIXED_CAPTURED = 512  # tokens up to which mixed steps are captured too: longer ones hide their launches
_MIXED_STEP = 64  # tokens to whose multiple longer ones are padded


def pick(buckets: Sequence[Bucket], tokens: int, rows: int, decode: bool, most_rows: int) -> tuple[Bucket, int, int]:
    """The bucket for a batch on a GPU, and the T and S it is padded to.

    rows: the larger one of sequences and sampled rows, at most ``most_rows``. decode: every sequence has one token, and
    is sampled. Raises ConfigError when no bucket takes so many tokens.
    """
    bucket = _find(buckets, tokens, decode)
    if bucket.kind == "decode":
        T = S = _padded(tokens, bucket.hi)
    else:
        T = max(bucket.lo, _padded(tokens, min(bucket.hi, MIXED_CAPTURED)))
        if tokens > MIXED_CAPTURED:
            T = min(bucket.hi, -(-tokens // _MIXED_STEP) * _MIXED_STEP)
        S = _sequences(bucket, _padded(rows, most_rows))
    return bucket, T, S


def pick_exact(buckets: Sequence[Bucket], tokens: int, rows: int, decode: bool) -> tuple[Bucket, int, int]:
    """`pick` on a CPU, where nothing is captured and so nothing need be padded."""
    bucket = _find(buckets, tokens, decode)
    if bucket.kind == "decode":
        return bucket, tokens, tokens
    return bucket, max(bucket.lo, tokens), _sequences(bucket, rows)


def _find(buckets: Sequence[Bucket], tokens: int, decode: bool) -> Bucket:
    """The first bucket that takes the batch, of the decode ones if it may."""
    for bucket in buckets:
        if decode and bucket.kind == "decode" and bucket.lo <= tokens <= bucket.hi:
            return bucket
    for bucket in buckets:
        if bucket.kind == "mixed" and tokens <= bucket.hi:
            return bucket
    raise ConfigError(f"no bucket of the artifact takes {tokens} tokens; compile with larger --buckets")


def is_captured(bucket: Bucket, tokens: int) -> bool:
    """Whether a step of that size is captured on a GPU."""
    return tokens <= (GRAPH_SIZES[-1] if bucket.kind == "decode" else MIXED_CAPTURED)


def _sequences(bucket: Bucket, rows: int) -> int:
    """A dynamic S is at least 2."""
    return 1 if bucket.hi == 1 else max(2, rows)


def _padded(size: int, limit: int) -> int:
    """The next size that is captured, but for the limit; sizes beyond the last one stay."""
    return next((min(limit, g) for g in GRAPH_SIZES if g >= size), size)
