"""LoRA adapters on the GPU beside PEFT's own model: compiled, mixed in one batch, in float32 and bfloat16."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from test_lora import ADAPTERS, FAMILIES, GREEDY, Family, _ids, _open, _prompts  # noqa: E402

MIXED = [None, *ADAPTERS] * 3


def _outputs(family: Family, dtype: str) -> list[Any]:
    requests = [name and family.adapters[name] for name in MIXED]
    options = {"backend": "inductor", "target": "cuda", "dtype": dtype, "block_size": 16, "tune": False}
    with _open(family, **options) as llm:
        return llm.generate(_ids(_prompts(len(MIXED))), GREEDY, lora_request=requests)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32(name: str, tmp_path: Path) -> None:
    family = Family(name, tmp_path)
    family.check(_outputs(family, "float32"), MIXED)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Our log-probabilities are as close to PEFT's float32 ones as PEFT's bfloat16 ones, up to a factor of 1.5."""
    family = Family(name, tmp_path)
    outputs = _outputs(family, "bfloat16")
    exact = family.model
    rounded = copy.deepcopy(exact).bfloat16()
    ours, theirs = _errors(family, outputs, exact, exact), _errors(family, outputs, exact, rounded)
    assert ours < 1.5 * theirs, (ours, theirs)


def _errors(family: Family, outputs: Sequence[Any], exact: Any, told: Any) -> float:
    """Root mean square over the likeliest tokens of every answer: of what we said when ``told`` is the exact model
    itself, else of what ``told`` says."""
    found = []
    for output, adapter in zip(outputs, MIXED, strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        family.model = exact
        expected = family.logprobs(tokens, adapter)
        family.model = told
        other = family.logprobs(tokens, adapter)
        family.model = exact
        for i, likeliest in enumerate(output.outputs[0].logprobs):
            at = len(output.prompt_token_ids) - 1 + i
            for token, ours in likeliest.items():
                said = ours.logprob if told is exact else float(other[at, token])
                found.append((said - float(expected[at, token])) ** 2)
    return (sum(found) / len(found)) ** 0.5
