"""Encoders and pooling decoders on a GPU beside transformers and sentence-transformers: ragged batches of 1 to 512
tokens in float32 and bfloat16, scores of cross-encoders and of late interaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from graphllm import LLM, PoolingParams
from graphllm.embedded import EMBEDDER_DIR

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


from tests.models import test_encoders as encoders  # noqa: E402

BY_NAME = {arch.name: arch for arch in encoders.ARCHS}
PROMPTS = encoders.prompts_of()
# Few compiles: each way of pooling once, and each family; no tuning.
FLOAT32 = ("bert_mean", "roberta_classes", "modernbert_cls", "nomic_bert")
BFLOAT16 = ("xlm_roberta_cls",)
OTHERS = [name for name in BY_NAME if name not in FLOAT32]
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15, "head_dim": 16,
}  # fmt: skip


def _open(folder: Path, dtype: str, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_num_seqs": 8, "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 1 << 28,
    }  # fmt: skip
    return LLM(folder, target="cuda", dtype=dtype, tune=False, **(given | options))


def _raw(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    params = PoolingParams(use_activation=False)
    return [output.outputs.data for output in llm.encode(prompts, params, use_tqdm=False)]


def _close(found: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel() > 8:
        assert float(1 - torch.cosine_similarity(found.double(), wanted.double(), dim=-1).min()) < most
    else:  # few numbers: classes
        torch.testing.assert_close(found, wanted, atol=1000 * most, rtol=1000 * most)


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, "float32", "inductor") for name in FLOAT32),
        *((name, "bfloat16", "inductor") for name in BFLOAT16),
        *((name, "float32", "eager") for name in BY_NAME),
        *(pytest.param(name, "float32", "inductor", marks=pytest.mark.slow) for name in OTHERS),
    ],
)
@torch.no_grad()
def test_encoders(name: str, dtype: str, backend: str, tmp_path: Path) -> None:
    """Cosine within 1e-5 of transformers in float32, and 1e-3 in bfloat16; the second time in another order."""
    arch = BY_NAME[name]
    model = encoders.make(arch, tmp_path / "m")
    most = 1e-5 if dtype == "float32" else 1e-3
    with _open(tmp_path / "m", dtype, backend=backend) as llm:
        for prompts in (PROMPTS, PROMPTS[::-1]):
            for found, prompt in zip(_raw(llm, prompts), prompts, strict=True):
                _close(found, encoders.expected(model, arch.pooling, prompt).float().reshape(found.shape), most)


@pytest.mark.parametrize("both_ways", [False, True])
@torch.no_grad()
def test_decoders(both_ways: bool, tmp_path: Path) -> None:
    """Qwen2 as an embedder, causal with prompts in parts, and as GTE-Qwen2, which sees both ways."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})
    model = transformers.Qwen2Model(config).eval()
    model.save_pretrained(tmp_path / "m")
    told = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**told, "is_causal": not both_ways}))
    with _open(tmp_path / "m", "float32", max_num_batched_tokens=1024 if both_ways else 256) as llm:
        for found, prompt in zip(_raw(llm, PROMPTS), PROMPTS, strict=True):
            n = len(prompt)
            mask = torch.zeros(1, 1, n, n) if both_ways else None
            wanted = model(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0, -1]
            _close(found, wanted, 1e-5)


@torch.no_grad()
def test_late_interaction(tmp_path: Path) -> None:
    """MaxSim of vectors for each token; a document that is scored again is not computed again."""
    arch = BY_NAME["bert_all"]
    model = encoders.make(arch, tmp_path / "m")
    query, *documents = PROMPTS[1:5]

    def states(prompt: list[int]) -> torch.Tensor:
        return encoders.expected(model, "ALL", prompt).float()

    wanted = [float((states(query) @ states(d).T).max(1).values.sum()) for d in documents]
    with _open(tmp_path / "m", "float32") as llm:
        for hits in (0, 4):
            scores = [o.outputs.score for o in llm.score([query], documents, use_tqdm=False)]
            assert scores == pytest.approx(wanted, rel=1e-5)
            assert llm.llm_engine.core.stats().token_vector_hits == hits


def test_beside_sentence_transformers() -> None:
    """The embedded embedder, texts in and vectors out."""
    library = pytest.importorskip("sentence_transformers")
    texts = ["A cat sleeps.", "a", "The dog of the neighbours runs over the road. " * 8]
    wanted = library.SentenceTransformer(str(EMBEDDER_DIR), device="cpu").float().encode(texts)
    with LLM(
        "embedded-embedder", target="cuda", dtype="float32", tune=False, kv_cache_memory_bytes=1 << 28
    ) as llm:  # fmt: skip
        found = np.array([o.outputs.embedding for o in llm.embed(texts, use_tqdm=False)])
    assert 1 - (found * wanted).sum(-1).min() < 1e-5
