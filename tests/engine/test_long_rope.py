"""LongRoPE and dynamic NTK: a text is the same whether what is before it came as prompt or as output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphllm import LLM, SamplingParams
from tests.tiers import thorough

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_BORDER = 64
_SHORT, _LONG = [1.0 + 0.05 * i for i in range(8)], [4.0 + 0.2 * i for i in range(8)]
_ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "max_position_embeddings": 256, "original_max_position_embeddings": _BORDER,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": _SHORT, "long_factor": _LONG},
    },
    "dynamic": {
        "max_position_embeddings": _BORDER,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}  # fmt: skip


def _saved(folder: Path, kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(2)
    family = "Phi3" if kind == "longrope" else "Llama"
    config = getattr(transformers, f"{family}Config")(**_SIZES, **_ROPES[kind], attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


def _open(folder: Path, max_model_len: int) -> LLM:
    return LLM(
        folder, skip_tokenizer_init=True, backend="eager", target="cpu", dtype="float32", max_num_seqs=2, block_size=8,
        max_num_batched_tokens=128, max_model_len=max_model_len, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip


def _prompt(count: int) -> list[int]:
    return torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("kind", ["longrope", thorough("dynamic")])
@torch.no_grad()
def test_across_the_border(kind: str, tmp_path: Path) -> None:
    """And the prefix cache shares what lies before it. Behind it, LongRoPE's long factors hold, as in transformers."""
    model = _saved(tmp_path, kind)
    prompt = _prompt(_BORDER - 4)
    with _open(tmp_path, 128) as llm:

        def said(ids: list[int], count: int) -> Any:
            params = SamplingParams(temperature=0, max_tokens=count, logprobs=0)
            return llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]

        whole = said(prompt, 12).outputs[0]
        for known in (0, 3, 4, 5, 11):
            again = said([*prompt, *whole.token_ids[:known]], 1)
            assert again.outputs[0].token_ids[0] == whole.token_ids[known]
            found, wanted = (next(iter(o.logprobs[i].values())) for o, i in ((again.outputs[0], 0), (whole, known)))
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert again.num_cached_tokens >= _BORDER - 8
        if kind == "longrope":
            prompt = _prompt(90)
            wanted = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 90:].tolist()
            assert said(prompt, 20).outputs[0].token_ids == wanted


@pytest.mark.parametrize("kind", ["longrope", thorough("dynamic")])
@torch.no_grad()
def test_contexts_within_the_border(kind: str, tmp_path: Path) -> None:
    """An engine that has no others computes as transformers does."""
    model = _saved(tmp_path, kind)
    prompt = _prompt(40)
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 40:].tolist()
    with _open(tmp_path, _BORDER) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        found = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    assert found.token_ids == wanted
