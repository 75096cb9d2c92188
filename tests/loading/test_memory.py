"""What memory allows: blocks and snapshots, and messages that say what takes it."""

from __future__ import annotations

import pytest

from graphllm.config import CacheConfig, CompileConfig, ConfigError, Target
from graphllm.loading import memory
from graphllm.loading.memory import cache_counts
from graphllm.program.manifest import MemoryTable

GB = 10**9
RECURRENT = 168 * 10**6  # bytes of a sequence, as of Mamba2 with 2.7 billion numbers


def _table(state: int, sequences: int, block: int = 0) -> MemoryTable:
    return MemoryTable(
        weights=5 * GB, arena=GB, arenas={}, zeroed=0, state=state * (sequences + 1), snapshot=state, block=block,
        token=0, blocks_of_sequence=0, unused_of_block=0, state_of_sequence=state,
    )  # fmt: skip


@pytest.mark.parametrize("block", [0, 1 << 20])
def test_states_that_do_not_fit_are_named(block: int) -> None:
    """On a GPU, with the option that helps and what each sequence takes; never a negative number of anything."""
    many = CompileConfig(Target("cuda", ("sm_90",)), max_num_seqs=1024)
    free, total = 135 * GB, 141 * GB
    says = r"states of 1024 sequences \(172.2 GB\).*--max-num-seqs \(each takes 168.0 MB\)"
    with pytest.raises(ConfigError, match=says):
        cache_counts(many, _table(RECURRENT, 1024, block), CacheConfig(), gpu=(free, total))
    few = CompileConfig(Target("cuda", ("sm_90",)), max_num_seqs=64)
    counts = cache_counts(few, _table(RECURRENT, 64, block), CacheConfig(), gpu=(free, total))
    assert 0 < counts.snapshots <= 4 * 64
    assert counts.blocks >= 2


def test_a_cpu_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * GB)
    config = CompileConfig(Target("cpu", ("x86_64",)), max_num_seqs=64)
    with pytest.raises(ConfigError, match=r"states of 64 sequences .*--max-num-seqs \(each takes"):
        cache_counts(config, _table(RECURRENT, 64), CacheConfig())
    with pytest.raises(ConfigError) as plain:
        cache_counts(config, _table(1000, 64), CacheConfig(kv_cache_memory_bytes=4 * GB))
    assert "states" not in str(plain.value)
