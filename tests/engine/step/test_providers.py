"""What fills the inputs that models declare, from specs as an artifact holds them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.config import ConfigError
from graphllm.engine.requests.request_table import RequestTable
from graphllm.engine.step.providers import StepRequests, find_providers
from graphllm.program.specs import InputSpec


def _loaded(spec: InputSpec) -> InputSpec:
    return msgspec.json.decode(msgspec.json.encode(spec), type=InputSpec)


def test_specs_come_back_as_they_were() -> None:
    spec = InputSpec("axes", (3, "T"), "int32", "mine", neutral=-1, counts=True)
    assert _loaded(spec) == spec


@pytest.mark.parametrize(("shape", "expected"), [(("S",), [2, 1]), (("T",), [2, 2, 2, 1]), (("R",), [2, 1, 1])])
def test_adapters_of_sequences_tokens_or_sampled_rows(shape: tuple[str, ...], expected: list[int]) -> None:
    table = RequestTable(4)
    table.adapter_id[:] = [0, 2, 1, 0]
    ((spec, provider),) = find_providers([_loaded(InputSpec("ids", shape, provider="adapter_ids"))])
    counts, positions = np.array([3, 1]), np.array([0, 1, 2, 7])
    step = StepRequests([], np.array([1, 2]), np.array([0, 7]), counts, np.array([1, 2]), positions, table)
    found = provider(spec, step)
    assert found is not None
    assert found.tolist() == expected
    assert provider(spec, step._replace(slots=np.array([0, 3]))) is None


def test_a_provider_that_nobody_offers() -> None:
    with pytest.raises(
        ConfigError, match="the model's input 'x' is filled by the provider 'nobody', which no installed"
    ):
        find_providers([InputSpec("x", ("T",), provider="nobody")])


def _step(counts: list[int], starts: list[int]) -> StepRequests:
    n, positions = np.array(counts, dtype=np.int32), np.concatenate([np.arange(c) for c in counts])
    return StepRequests([], np.arange(len(counts)), np.array(starts), n, n, positions, RequestTable(len(counts)))


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 3)), min_size=1, max_size=12), st.sampled_from([1, 8, 16, 64])
)
def test_where_sequences_and_their_chunks_lie(sequences: list[tuple[int, int]], size: int) -> None:
    """Each token belongs to one sequence and one chunk of it; chunks find room in the shape."""
    counts, starts = map(list, zip(*sequences, strict=True))
    step, T = _step(counts, starts), sum(counts)
    found = {}
    for name, shape in (
        ("sequence_ids", ("T",)), ("fresh", ("S",)), ("num_decodes", (1,)), ("chunks", (f"T // {size} + S", 2)),
    ):  # fmt: skip
        ((spec, provider),) = find_providers([_loaded(InputSpec(name, shape, provider=name))])
        found[name] = provider(spec, step)
    ids = found["sequence_ids"].tolist()
    assert ids == [s for s, count in enumerate(counts) for _ in range(count)]
    assert found["fresh"].tolist() == [int(start == 0) for start in starts]
    (decodes,) = found["num_decodes"].tolist()
    assert all(c == 1 for c in counts[:decodes])
    assert decodes == len(counts) or counts[decodes] > 1
    chunks = found["chunks"]
    assert len(chunks) <= T // size + len(counts)
    taken = []
    for sequence, first in chunks.tolist():
        rows = [t for t in range(first, min(first + size, T)) if ids[t] == sequence]
        assert rows == list(range(first, first + len(rows)))
        taken += rows
    assert taken == list(range(T))


def test_chunks_of_another_shape_are_refused() -> None:
    ((spec, provider),) = find_providers([InputSpec("c", ("T // 0 + S", 2), provider="chunks")])
    with pytest.raises(ConfigError, match=r'the input \'c\' .* needs the shape \("T // C \+ S", 2\)'):
        provider(spec, _step([3], [0]))
