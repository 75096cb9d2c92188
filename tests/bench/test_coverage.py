"""docs/models.md is up to date: its text, its types, and a sample of its rows measured again."""

from __future__ import annotations

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.coverage.check import check
from bench.coverage.page import PAGE, Table, page
from bench.coverage.row import Row
from bench.coverage.tiny import VOCABULARY, tiny
from tests.tiers import thorough

TABLE = Table.read()
# Windows, half rotations, norms after, biases; and two that are refused.
SAMPLE = ("cohere2", "gpt_neox", "olmo2", "starcoder2", "bloom", "rwkv")
FURTHER = (
    "arcee", "biogpt", "bitnet", "cohere", "cwm", "diffllama", "ernie4_5", "exaone4", "flex_olmo", "gemma", "glm",
    "glm4", "gpt_bigcode", "granitemoeshared", "helium", "hunyuan_v1_dense", "llama", "mixtral", "nemotron", "olmo",
    "olmo3", "persimmon", "phi", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "vaultgemma", "xglm", "falcon",
)  # fmt: skip


def test_page_is_as_generated() -> None:
    assert PAGE.read_text() == page(TABLE), "run python -m bench.coverage"


@pytest.mark.skipif(TABLE.transformers != transformers.__version__, reason="another version has other types")
def test_every_type_has_a_row() -> None:
    assert set(TABLE.rows) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "run python -m bench.coverage"


def test_no_row_is_wrong() -> None:
    results = [
        (row.model_type, r.state) for row in TABLE.rows.values() for r in (row.ours, row.traced) if r is not None
    ]
    assert not [name for name, state in results if state == "wrong"]


def test_tiny_configs_have_every_kind_of_layer() -> None:
    """As few layers as tell all kinds apart, in every list that goes by layer."""
    found = tiny("gemma3_text")
    assert sorted(set(found["layer_types"])) == ["full_attention", "sliding_attention"]
    assert len(found["layer_types"]) == found["num_hidden_layers"] <= 4
    assert (found["vocab_size"], found["hidden_size"]) == (VOCABULARY, 64)
    assert found["num_attention_heads"] * found["head_dim"] == 64


@pytest.mark.skipif(TABLE.transformers != transformers.__version__, reason="another version has other code")
@pytest.mark.parametrize("model_type", [*SAMPLE, *map(thorough, FURTHER)])
def test_a_row_is_what_is_measured(model_type: str) -> None:
    found, there = check(model_type), TABLE.rows[model_type]
    assert _states(found) == _states(there)
    assert found.traced is not None
    assert there.traced is not None
    assert found.traced.code == there.traced.code


def _states(row: Row) -> tuple[str | None, ...]:
    return (row.architecture, *(None if r is None else r.state for r in (row.ours, row.traced)))
