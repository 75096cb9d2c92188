"""Embeddings of bare decoders beside transformers, through `LLM`: ragged prompts, chunked prefill, dimensions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphllm import PoolingParams, SamplingParams
from graphllm.config import ConfigError
from tests.engine.vectors.opened import open_llm

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaModel, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralModel, {"sliding_window": 24, "head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2Model, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model, {"head_dim": 16}),
    "mamba": (transformers.MambaConfig, transformers.MambaModel, {"intermediate_size": 64}),
    "jamba": (transformers.JambaConfig, transformers.JambaModel,
              {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}),
}  # fmt: skip


def _make(name: str, folder: Path) -> transformers.PreTrainedModel:
    config, kind, more = ARCHITECTURES[name]
    torch.manual_seed(3)
    model = kind(config(**SIZES | more)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_beside_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of 1 to 512 tokens, many longer than a step's 64, twice, so that the prefix cache serves the second."""
    model = _make(name, tmp_path / "model")
    lengths = (1, 2, 63, 64, 65, 40, 512)
    prompts = [[(i * 7 + n) % 96 for i in range(n)] for n in lengths]
    with torch.no_grad():
        states = [model(torch.tensor([p])).last_hidden_state[0, -1] for p in prompts]
    with open_llm(tmp_path / "model", max_model_len=512, max_num_batched_tokens=64) as llm:
        for _ in range(2):
            found = llm.embed(prompts, use_tqdm=False)
            assert [o.prompt_token_ids for o in found] == prompts
            for output, state in zip(found, states, strict=True):
                vector = torch.tensor(output.outputs.embedding)
                assert abs(vector.norm().item() - 1) < 1e-5
                assert torch.cosine_similarity(vector, state, dim=0) > 1 - 1e-5
        assert found[-1].num_cached_tokens > 0
        params = [PoolingParams(normalize=False), PoolingParams(dimensions=8)]
        raw, short = (o.outputs.data for o in llm.encode(prompts[:2], params, use_tqdm=False))
        torch.testing.assert_close(raw, states[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(short, torch.nn.functional.normalize(states[1][:8], dim=0), rtol=1e-4, atol=1e-4)


def _both_ways(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """The hidden states where a mask of zeros hides nothing."""
    n = len(prompt)
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([prompt]), attention_mask=torch.zeros(1, 1, n, n)).last_hidden_state
    return states[0]


def _see_both_ways(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "is_causal": False}))


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS", "ALL"])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_decoders_that_attend_both_ways(name: str, pooling: str, tmp_path: Path) -> None:
    """GTE-Qwen2's kind: is_causal is false. Ragged prompts up to a step's tokens, each computed whole."""
    model = _make(name, tmp_path / "model")
    _see_both_ways(tmp_path / "model")
    prompts = [[(i * 7 + n) % 96 for i in range(n)] for n in (1, 2, 15, 40, 512)]
    with open_llm(tmp_path / "model", max_model_len=512, max_num_batched_tokens=512, pooling_type=pooling) as llm:
        found = [o.outputs.data for o in llm.encode(prompts, PoolingParams(normalize=False), use_tqdm=False)]
    for prompt, vector in zip(prompts, found, strict=True):
        states = _both_ways(model, prompt)
        expected = {"LAST": states[-1], "MEAN": states.mean(0), "CLS": states[0], "ALL": states}[pooling]
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", [False, True])
def test_compiled(both_ways: bool, tmp_path: Path) -> None:
    """Ragged prompts of 1 to 512 tokens, causal ones in parts of 100."""
    model = _make("qwen2", tmp_path / "model")
    if both_ways:
        _see_both_ways(tmp_path / "model")
    prompts = [[(i * 7 + n) % 96 for i in range(n)] for n in (1, 2, 40, 512, 101, 100)]
    tokens = 512 if both_ways else 100
    with open_llm(tmp_path / "model", backend="inductor", max_model_len=512, max_num_batched_tokens=tokens) as llm:
        for output, prompt in zip(llm.embed(prompts, use_tqdm=False), prompts, strict=True):
            if both_ways:
                state = _both_ways(model, prompt)[-1]
            else:
                with torch.no_grad():
                    state = model(torch.tensor([prompt])).last_hidden_state[0, -1]
            assert torch.cosine_similarity(torch.tensor(output.outputs.embedding), state, dim=0) > 1 - 1e-5


def test_refusals(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _make("llama", folder)
    with open_llm(folder) as llm:
        with pytest.raises(ConfigError, match="the model gives vectors and generates no text; use embed"):
            llm.generate([1, 2], SamplingParams(max_tokens=1))
        with pytest.raises(ConfigError, match=r"prompts\[0\]: dimensions is 0: give at least 1"):
            llm.embed([1], pooling_params=PoolingParams(dimensions=0))
        with pytest.raises(ConfigError, match="dimensions is 33: the model gives 32"):
            llm.embed([1], pooling_params=PoolingParams(dimensions=33), use_tqdm=False)
        with pytest.raises(ConfigError, match="pooling_task is 'classify': the model gives embeddings"):
            llm.encode([1], pooling_task="classify")
        with pytest.raises(ConfigError, match="prompt has 129 tokens"):
            llm.embed([1] * 129)
        assert len(llm.embed([1] * 128, use_tqdm=False)[0].outputs.embedding) == 32
        with pytest.raises(ConfigError, match=r"^prompts\[1\]: prompt is empty"):
            llm.embed([[1], []])
        with pytest.raises(ConfigError, match=r"^data_2\[1\]: prompt is empty"):
            llm.score([1], [[1], []])
        with pytest.raises(ConfigError, match="pooling_params is 5"):
            llm.embed([1], pooling_params=5, truncate_prompt_tokens=3)  # type: ignore[arg-type]
        long, short = [1 + i % 90 for i in range(200)], [1, 2, 3]
        (expected,) = llm.embed([short])
        for given in (None, PoolingParams(), [PoolingParams(truncate_prompt_tokens=9)]):
            for method in (llm.embed, llm.encode):
                (found,) = method([long], pooling_params=given, truncate_prompt_tokens=3)
                assert found.prompt_token_ids == short
        (found,) = llm.embed([long], truncate_prompt_tokens=3)
        assert found.outputs.embedding == expected.outputs.embedding
        assert llm.score(long, short, truncate_prompt_tokens=3)[0].outputs.score == pytest.approx(1)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with pytest.raises(ConfigError, match="pooling_type is MEAN: LlamaModel computes prompts in parts"):
        open_llm(folder)
    _make("mistral", tmp_path / "windows")
    _see_both_ways(tmp_path / "windows")
    with pytest.raises(ConfigError, match="is_causal is False with sliding_window"):
        open_llm(tmp_path / "windows")
