"""What fills the inputs that models declare, from specs as an artifact holds them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

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
