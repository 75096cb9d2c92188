"""LoRA adapters on the GPU beside PEFT's own model: three tiny artifacts in bfloat16, each compiled once, without
tuning, for all that is checked with it. Other families and float32 are slow tests.

Our log-probabilities must be as close to PEFT's float32 ones as PEFT's bfloat16 ones, up to a factor of 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
from graphllm import LLM  # noqa: E402
from tests.engine.adapters import test_lora, test_moe_lora  # noqa: E402
from tests.engine.adapters.test_lora import ADAPTERS, FAMILIES, GREEDY, _ids, _prompts  # noqa: E402

NATIVE: dict[str, Any] = {"backend": "inductor", "target": "cuda", "block_size": 16, "tune": False,
                          "kv_cache_memory_bytes": 1 << 28}  # fmt: skip
MIXED = [None, *ADAPTERS] * 3
Family = test_lora.Family | test_moe_lora.Family


def _run(llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[str | None], requests: dict[str, Any]) -> list[Any]:
    return llm.generate(_ids(prompts), GREEDY, lora_request=[name and requests[name] for name in adapters])


def _check(family: Family, outputs: Sequence[Any], adapters: Sequence[str | None]) -> None:
    ours, theirs, rounded = [], [], family.rounded()
    for output, adapter in zip(outputs, adapters, strict=True):
        assert output.outputs[0].finish_reason == "length", output.outputs[0].error
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        exact, near = (of.logprobs(tokens, adapter) for of in (family, rounded))
        for i, likeliest in enumerate(output.outputs[0].logprobs):  # the first is of prefill, the others of decode
            at = len(output.prompt_token_ids) - 1 + i
            for token, told in likeliest.items():
                ours.append(told.logprob - float(exact[at, token]))
                theirs.append(float(near[at, token] - exact[at, token]))
        for i in range(1, len(output.prompt_token_ids)):
            token = output.prompt_token_ids[i]
            ours.append(output.prompt_logprobs[i][token].logprob - float(exact[i - 1, token]))
            theirs.append(float(near[i - 1, token] - exact[i - 1, token]))
    errors = [float(torch.tensor(found).square().mean().sqrt()) for found in (ours, theirs)]
    print(f"\n{adapters}: root mean square of ours {errors[0]:.2e}, of PEFT in bfloat16 {errors[1]:.2e}")
    assert errors[0] < 1.5 * errors[1], errors


def test_dense(tmp_path: Path) -> None:
    """Alone, mixed in one batch, and loaded in the place of each other: two entries serve three adapters, and then one
    whose files have changed."""
    family = test_lora.Family("qwen2", tmp_path)
    with test_lora._open(family, dtype="bfloat16", **NATIVE) as llm:
        for adapter in (None, *ADAPTERS, "all"):
            prompts = _prompts(4, seed=1)
            _check(family, _run(llm, prompts, [adapter] * 4, family.adapters), [adapter] * 4)
        _check(family, _run(llm, _prompts(len(MIXED)), MIXED, family.adapters), MIXED)
        file = Path(family.adapters["some"].lora_path) / "adapter_model.safetensors"
        save_file({n: -t if "lora_B" in n else t for n, t in load_file(file).items()}, file, {"format": "pt"})
        for name, values in family.model.named_parameters():
            if "lora_B.some." in name:
                values.data.neg_()
        _check(family, _run(llm, _prompts(len(MIXED), seed=2), MIXED, family.adapters), MIXED)


def test_over_int8(tmp_path: Path) -> None:
    family = test_lora.Family("qwen2", tmp_path)
    family.quantize()
    with test_lora._open(family, dtype="bfloat16", quantization="int8", **NATIVE) as llm:
        _check(family, _run(llm, _prompts(len(MIXED)), MIXED, family.adapters), MIXED)


def test_experts_embedding_and_head(tmp_path: Path) -> None:
    """Few tokens and many: the kernels of fused_moe differ from 33 tokens on."""
    ends = {"r": 5, "target_modules": ["embed_tokens", "lm_head", "o_proj"], "target_parameters": test_moe_lora.BOTH}
    adapters = {**test_moe_lora.ADAPTERS, "ends": ends}
    family = test_moe_lora.Family("all_chosen", tmp_path, adapters)
    mixed = [None, *adapters] * 3
    wanted = ("q_proj", "o_proj", "experts", "embed_tokens", "lm_head")
    options = {"lora_target_modules": wanted, "max_num_batched_tokens": 64, "dtype": "bfloat16"}
    with test_moe_lora._open(family, **options, **NATIVE) as llm:
        for adapter in (None, "ends"):
            _check(family, _run(llm, _prompts(2, seed=1), [adapter] * 2, family.requests), [adapter] * 2)
        _check(family, _run(llm, _prompts(len(mixed)), mixed, family.requests), mixed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_float32(name: str, tmp_path: Path) -> None:
    family = test_lora.Family(name, tmp_path)
    with test_lora._open(family, dtype="float32", **NATIVE) as llm:
        family.check(_run(llm, _prompts(len(MIXED)), MIXED, family.adapters), MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    family = test_lora.Family(name, tmp_path)
    with test_lora._open(family, dtype="bfloat16", **NATIVE) as llm:
        _check(family, _run(llm, _prompts(len(MIXED)), MIXED, family.adapters), MIXED)
