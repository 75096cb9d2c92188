"""Padding of batches: it fits the batch and the bucket, wastes little, and makes few sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.config import Bucket, ConfigError, Target, default_buckets
from graphllm.runtime.sizes import GRAPH_SIZES, is_captured, pick, pick_exact

GPU = Target("cuda", ("sm_90",))


@given(st.integers(1, 300), st.integers(1, 4096), st.data())
def test_a_batch_fits(most_rows: int, most_tokens: int, data: st.DataObject) -> None:
    """For every batch the limits allow, prompts or none."""
    most_tokens = max(most_tokens, most_rows, 2)
    buckets = default_buckets(GPU, most_rows, most_tokens)
    rows = data.draw(st.integers(1, most_rows))
    decode = data.draw(st.booleans())
    tokens = rows if decode else data.draw(st.integers(max(rows, 2), max(most_tokens, 2)))
    bucket, T, S = pick(buckets, tokens, rows, decode, most_rows)
    limits = bucket.limits(most_rows)
    assert bucket.kind == ("decode" if decode else "mixed")
    assert tokens <= T <= limits["T"]
    assert rows <= S <= limits["S"]
    assert max(2 * tokens, 2) >= T
    assert tokens <= 24 or 1.34 * tokens >= T
    if not decode and tokens > 512:
        assert T - tokens < 64
        assert not is_captured(bucket, T)
    if is_captured(bucket, T):
        assert T in GRAPH_SIZES or bucket.hi == T
    assert pick_exact(buckets, tokens, rows, decode) == (bucket, tokens, tokens if decode else max(2, rows))


def test_one_prompt_token_is_padded_to_two() -> None:
    mixed = (Bucket("mixed", 2, 64),)
    assert pick(mixed, 1, 1, False, 8) == (mixed[0], 2, 2)
    assert pick_exact(mixed, 1, 1, False) == (mixed[0], 2, 2)
    one = (Bucket("mixed", 1, 1), *mixed)
    assert pick(one, 1, 1, False, 8) == (one[0], 1, 1)


def test_few_mixed_sizes() -> None:
    buckets = default_buckets(GPU, 256, 8192)
    assert len({pick(buckets, n, 1, False, 256)[1] for n in range(2, 8193)}) <= 145


def test_decode_beyond_its_buckets_is_mixed() -> None:
    buckets = (Bucket("decode", 1, 1), Bucket("mixed", 2, 32))
    assert pick(buckets, 3, 3, True, 8)[0].kind == "mixed"
    with pytest.raises(ConfigError, match="no bucket of the artifact takes 33 tokens; compile with larger --buckets"):
        pick(buckets, 33, 4, False, 8)
