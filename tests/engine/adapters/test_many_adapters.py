"""Far more adapters than have tables, or even room in memory: every answer is what the adapter gives alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from graphllm import LLM
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.parts.adapters import Adapters
from graphllm.engine.requests.request import Adapter
from graphllm.weights.adapters.adapters import adapter_digest
from tests.engine.harness import request

V, COUNT = 61, 8
CONFIG = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
RANK, ALPHA = 2, 3


class Model:
    """A tiny Qwen2, adapters in folders, and what each gives."""

    def __init__(self, folder: Path, adapters: int) -> None:
        torch.manual_seed(5)
        config = transformers.Qwen2Config(**CONFIG)
        self.model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        self.folder = folder / "model"
        self.model.save_pretrained(self.folder)
        self._base = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._changes: list[dict[str, torch.Tensor]] = [{}]
        self.adapters: list[Adapter | None] = [None]
        for number in range(adapters):
            place = folder / f"adapter-{number}"
            place.mkdir()
            fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
            (place / "adapter_config.json").write_text(json.dumps(fields))
            tensors, changes = {}, {}
            for name, weight in self._base.items():
                module = name.removesuffix(".weight")
                if module.endswith(("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")) and weight.ndim == 2:
                    a, b = torch.randn(RANK, weight.shape[1]) / 4, torch.randn(weight.shape[0], RANK) / 4
                    tensors |= {f"base_model.model.{module}.lora_{n}.weight": t for n, t in (("A", a), ("B", b))}
                    changes[name] = ALPHA / RANK * b @ a
            save_file(tensors, place / "adapter_model.safetensors")
            self.adapters.append(Adapter(f"{number}", str(place), adapter_digest(place)))
            self._changes.append(changes)

    @torch.no_grad()
    def expected(self, number: int, prompt: list[int]) -> list[int]:
        """The greedy continuation with an adapter, 0 for none."""
        for name, parameter in self.model.named_parameters():
            if name in self._changes[number] or number == 0 or self._changes[-1].get(name) is not None:
                parameter.copy_(self._base[name] + self._changes[number].get(name, 0.0))
        ids = torch.tensor([prompt])
        for _ in range(COUNT):
            ids = torch.cat([ids, self.model(ids).logits[:, -1:].argmax(-1)], 1)
        return ids[0, len(prompt) :].tolist()


def _run(model: Model, llm: LLM, count: int, rng: random.Random) -> dict[str, int]:
    """Requests that come in waves while others run, some of which are aborted; every answer of the rest is checked."""
    core: Any = llm.llm_engine.core
    asked: dict[str, tuple[int, list[int]]] = {}
    tokens: dict[str, list[int]] = {}
    ended: dict[str, int] = {"length": 0, "abort": 0}
    running: list[str] = []
    while len(asked) < count or core.unfinished:
        for _ in range(rng.choice([0, 0, 1, 3, 12])):
            if len(asked) < count:
                id, number = f"{len(asked)}", rng.randrange(len(model.adapters))
                prompt = [rng.randrange(V) for _ in range(rng.choice([1, 6, 17, 40]))]
                asked[id], tokens[id] = (number, prompt), []
                core.add(request(id, prompt, GREEDY, limit=COUNT, adapter=model.adapters[number]))
                running.append(id)
        if running and rng.random() < 0.1:
            core.abort([rng.choice(running)])
        for output in core.step():
            tokens[output.id] += output.tokens
            if output.finish_reason is not None:
                assert output.error is None
                ended[output.finish_reason] += 1
                running.remove(output.id)
                if output.finish_reason == "length":
                    number, prompt = asked[output.id]
                    assert tokens[output.id] == model.expected(number, prompt), (output.id, number)
    table = core.part(Adapters).resource
    assert not table.used
    assert not table._users[0]
    assert len(core.part(Adapters).memory.digests) <= 32
    assert core.scheduler.cache.pool.free_blocks == core.info.num_blocks - 1
    return ended


def _open(model: Model, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "dtype": "float32", "backend": "eager", "max_model_len": 64, "max_num_seqs": 12, "max_num_batched_tokens": 48,
        "block_size": 8, "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 8, "max_lora_rank": 2,
        "max_cpu_loras": 32, "enable_prefix_caching": True,
    }  # fmt: skip
    return LLM(model.folder, **{**given, **options})


@pytest.mark.thorough
def test_twenty_adapters_in_three_tables(tmp_path: Path) -> None:
    """With drafts, and a cache that is too small for all."""
    model = Model(tmp_path, 20)
    options = {"max_loras": 3, "max_cpu_loras": 5, "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with _open(model, **options, kv_cache_memory_bytes=36 * 8 * 2 * 2 * 2 * 8 * 4) as llm:
        ended = _run(model, llm, 80, random.Random(1))
    assert ended["length"] > 50
    assert ended["abort"] > 0


@pytest.mark.slow
def test_two_hundred_adapters(tmp_path: Path) -> None:
    model = Model(tmp_path, 200)
    with _open(model) as llm:
        ended = _run(model, llm, 1000, random.Random(2))
    assert sum(ended.values()) == 1000
    assert ended["abort"] > 20
