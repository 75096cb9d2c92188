"""Padding of batches: it fits the batch and the bucket, wastes little, and makes few sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.config import Bucket, ConfigError, Target, default_buckets
from graphllm.runtime.memory.padding import GRAPH_SIZES, Size, is_captured, pick

GPU = Target("cuda", ("sm_90",))


@given(st.integers(1, 300), st.integers(1, 4096), st.data())
def test_a_batch_fits(most_rows: int, most_tokens: int, data: st.DataObject) -> None:
    """For every batch the limits allow, prompts or none."""
    most_tokens = max(most_tokens, most_rows, 2)
    buckets = default_buckets(GPU, most_rows, most_tokens)
    rows = data.draw(st.integers(1, most_rows))
    decode = data.draw(st.booleans())
    tokens = rows if decode else data.draw(st.integers(max(rows, 2), max(most_tokens, 2)))
    sampled = rows if decode else data.draw(st.integers(0, most_rows))
    size = pick(buckets, tokens, rows, sampled, int(decode), most_rows, exact=False)
    bucket, T, S, R = size
    limits = bucket.limits(most_rows)
    assert bucket.kind == ("decode" if decode else "mixed")
    assert tokens <= T <= limits["T"]
    assert rows <= S <= limits["S"]
    assert sampled <= R <= limits["R"]
    assert R == S or (not decode and sampled > S)
    assert max(2 * tokens, 2) >= T
    assert tokens <= 24 or 1.34 * tokens >= T
    if not decode and tokens > 512:
        assert T - tokens < 64
        assert not is_captured(bucket, T)
    if is_captured(bucket, T):
        assert T in GRAPH_SIZES or bucket.hi == T
    exact = pick(buckets, tokens, rows, sampled, int(decode), most_rows, exact=True)
    few = rows if decode else max(2, rows)
    assert exact == (bucket, tokens, few, rows if decode else max(2, sampled))


def test_one_prompt_token_is_padded_to_two() -> None:
    mixed = (Bucket("mixed", 2, 64),)
    for exact in (False, True):
        assert pick(mixed, 1, 1, 1, 0, 8, exact) == Size(mixed[0], 2, 2, 2)
    one = (Bucket("mixed", 1, 1), *mixed)
    assert pick(one, 1, 1, 1, 0, 8, False) == Size(one[0], 1, 1, 1)


def test_few_mixed_sizes() -> None:
    buckets = default_buckets(GPU, 256, 8192)
    assert len({pick(buckets, n, 1, 1, 0, 256, False).T for n in range(2, 8193)}) <= 145


def test_decode_beyond_its_buckets_is_mixed() -> None:
    buckets = (Bucket("decode", 1, 1), Bucket("mixed", 2, 32))
    assert pick(buckets, 3, 3, 3, 1, 8, False).bucket.kind == "mixed"
    with pytest.raises(ConfigError, match="no bucket of the artifact takes 33 tokens; compile with larger --buckets"):
        pick(buckets, 33, 4, 4, 0, 8, False)


def test_several_tokens_a_sequence_have_buckets_of_their_own() -> None:
    """Of exactly so many, and only where they were compiled."""
    buckets = (
        Bucket("decode", 1, 1),
        Bucket("decode", 2, 8),
        Bucket("decode", 2, 8, query_len=3),
        Bucket("mixed", 2, 64),
    )
    assert pick(buckets, 9, 3, 9, 3, 8, False) == Size(buckets[2], 12, 4, 12)
    assert pick(buckets, 9, 3, 9, 3, 8, True) == Size(buckets[2], 9, 3, 9)
    assert pick(buckets, 3, 3, 3, 1, 8, True) == Size(buckets[1], 3, 3, 3)
    assert pick(buckets, 6, 3, 6, 2, 8, True).bucket.kind == "mixed"
    assert buckets[2].name == "decode3-2-8"
    assert buckets[2].limits(8) == {"T": 24, "S": 8, "R": 24}
