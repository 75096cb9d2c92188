"""The CUDA backend in bfloat16 against transformers: every family's logits, greedy tokens, greedy text. In float32 the
tests of models/test_parity.py run there."""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphllm.embedded import SHIPPED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


from tests.models import test_parity as parity  # noqa: E402

ARCHS = [a for a in parity.ARCHS if a.name in parity.EACH]


@pytest.mark.parametrize("arch", ARCHS, ids=lambda a: a.name)
@torch.no_grad()
def test_bfloat16(arch: object, tmp_path: Path) -> None:
    """Of most prompts, our bf16 logits are as close to float32 as transformers' bf16 ones, up to a factor of 1.5.

    In either, a router may choose another expert after rounding, which changes a prompt's logits by a tenth.
    """
    model = parity.saved_oracle(arch, tmp_path)
    runner = parity.driver.Driver(tmp_path, "inductor", "bfloat16", "cuda")
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(parity.V, (n,), generator=draw).tolist() for n in (64, 300, 33, 20, 50)]
    logits, _ = runner.generate(prompts, 1)
    half = copy.deepcopy(model).bfloat16().cuda().eval()
    our_errors, their_errors = [], []
    for ours, prompt in zip(logits, prompts, strict=True):
        ids = torch.tensor([prompt])
        exact = model(ids).logits[0, -1]
        theirs = half(ids.cuda()).logits[0, -1].float().cpu()
        our_errors.append(float((ours - exact).norm() / exact.norm()))
        their_errors.append(float((theirs - exact).norm() / exact.norm()))
    assert statistics.median(our_errors) <= 1.5 * statistics.median(their_errors)


@pytest.mark.parametrize("name", ["llama_llama3", "qwen3"])
@torch.no_grad()
def test_decode_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Decode steps of fused and tuned kernels, alone and five together (of eight in the bucket), are as close to
    float32 as transformers' bf16, up to a factor of 1.5."""
    (arch,) = (a for a in ARCHS if a.name == name)
    model = parity.saved_oracle(arch, tmp_path)
    runner = parity.driver.Driver(tmp_path, "inductor", "bfloat16", "cuda", tune=True)
    draw = torch.Generator().manual_seed(2)
    sequences = [torch.randint(parity.V, (n,), generator=draw).tolist() for n in (40, 90, 333, 17, 64)]
    half = copy.deepcopy(model).bfloat16().cuda().eval()
    steps = 12
    for batch in (sequences, sequences[2:3]):
        our_errors, their_errors = 0.0, 0.0
        for ours, ids in zip(runner.forced(batch, steps), batch, strict=True):
            exact = model(torch.tensor([ids])).logits[0, -steps:]
            theirs = half(torch.tensor([ids]).cuda()).logits[0, -steps:].float().cpu()
            our_errors += float((ours - exact).norm() / exact.norm())
            their_errors += float((theirs - exact).norm() / exact.norm())
        assert our_errors <= 1.5 * their_errors


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("embedded", "bfloat16"), ("embedded", "float32"), ("embedded-moe", "float32"), ("embedded-hybrid", "float32")],
)
def test_embedded_model_greedy_text(name: str, dtype: str) -> None:
    """An embedded model's greedy text equals transformers' on the same GPU, token for token. With experts in float32
    only: in bf16 two experts that are nearly as good change places by rounding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = SHIPPED[name]
    questions = ["What is 12 + 7?", "What is the capital of France?", "Sort these numbers: 9, 3, 7", "Who are you?"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda().eval()
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids.to("cuda"), max_new_tokens=48, do_sample=False)[0, ids["input_ids"].shape[1] :]
        expected = tokenizer.decode(out, skip_special_tokens=True)
        command = [
            sys.executable, "-m", "graphllm.cli", "run", "-q", "--model", name, "--target", "cuda", "--dtype", dtype,
            "-p", question, "--temperature", "0", "--max-tokens", "48", "--kv-cache-memory-bytes", "256MiB",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.rstrip("\n") == expected.rstrip("\n")
