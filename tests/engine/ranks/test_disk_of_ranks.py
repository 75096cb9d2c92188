"""The tier on disk of two ranks: each has files of its share, and a block counts when both have theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphllm import LLM, SamplingParams
from tests.engine.ranks.test_ranks import EAGER

pytestmark = pytest.mark.thorough
_PROMPTS = [f"{word}: the cat sat on the mat, and the words went on and on" for word in ("one", "two", "three", "four")]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def _texts(checkpoint: Path, folder: Path | None, ranks: int = 2) -> tuple[list[tuple[int, ...]], int]:
    """The texts of the prompts, one after another, and the tokens that came from the cache with the last one."""
    tiers = {} if folder is None else {"kv_offloading_size": "8MiB", "kv_offloading_disk": folder}
    with LLM(checkpoint, tensor_parallel_size=ranks, **EAGER, **tiers) as llm:
        outputs = [llm.generate(prompt, _GREEDY)[0] for prompt in _PROMPTS]
    return [tuple(output.outputs[0].token_ids) for output in outputs], outputs[-1].num_cached_tokens or 0


def test_a_second_engine(checkpoint: Path, tmp_path: Path) -> None:
    expected, _ = _texts(checkpoint, None)
    first, before = _texts(checkpoint, tmp_path)
    stores = sorted(tmp_path.glob("*/blocks-*"))
    assert [store.name for store in stores] == ["blocks-0of2", "blocks-1of2"]
    files = [{file.name for file in store.glob("??/?/*")} for store in stores]
    assert files[0] == files[1] != set()
    second, after = _texts(checkpoint, tmp_path)
    assert (first, second) == (expected, expected)
    assert after > before
    for file in list(stores[1].glob("??/?/*")):
        file.unlink()  # of one rank only: nothing is there
    third, without = _texts(checkpoint, tmp_path)
    assert (third, without) == (expected, before)
    assert _texts(checkpoint, tmp_path, ranks=1) == (expected, before)  # other files
