"""Families with recurrent layers against transformers, in every way in which requests run: tiny random checkpoints in
float32, odd sizes, greedy tokens and the chance of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from graphllm import LLM, SamplingParams
from graphllm.entrypoints.metrics_reader import Counter
from tests.tiers import ON_GPU

V, N_TOKENS, CACHE = 131, 12, 8 << 20
IDS = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MAMBA2 = IDS | {
    "hidden_size": 48, "num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 24, "num_hidden_layers": 3,
    "conv_kernel": 4, "expand": 2, "chunk_size": 8, "initializer_range": 0.3,
}  # fmt: skip
GRANITE = IDS | {
    "hidden_size": 48, "intermediate_size": 40, "shared_intermediate_size": 56, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 24, "mamba_chunk_size": 8, "initializer_range": 0.3, "num_local_experts": 5,
    "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
    "logits_scaling": 2.0, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
ATTENTION = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
NEMOTRON = IDS | ATTENTION | {
    "head_dim": 12, "intermediate_size": 40, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 24, "chunk_size": 8,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
}  # fmt: skip
LFM2 = IDS | ATTENTION | {"intermediate_size": 60, "num_hidden_layers": 4, "block_multiple_of": 8}
FALCON = IDS | ATTENTION | {
    "intermediate_size": 60, "num_hidden_layers": 2, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_ssm": 96,
    "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 8,
}  # fmt: skip
DELTA = ATTENTION | IDS | {
    "intermediate_size": 60, "num_hidden_layers": 4, "head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 20, "linear_value_head_dim": 17, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 40,
    "initializer_range": 0.15,  # with more, transformers itself is off by as much in float32
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    """One checkpoint to make: a model of transformers, by its class, and its config."""

    name: str
    model: str
    config: dict[str, Any]


ARCHS = (
    Arch("mamba2", "Mamba2", MAMBA2),
    Arch(
        "mamba2_odd", "Mamba2",
        MAMBA2 | {"n_groups": 1, "head_dim": 12, "num_heads": 8, "state_size": 7, "conv_kernel": 3, "use_bias": True,
                  "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    Arch("granite_hybrid", "GraniteMoeHybrid", GRANITE),
    Arch(
        "granite_hybrid_dense", "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_n_heads": 4,
                   "mamba_d_head": "auto", "mamba_proj_bias": True,
                   "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    Arch("nemotron_h", "NemotronH", NEMOTRON),
    Arch("nemotron_h_biases", "NemotronH", NEMOTRON | {"use_bias": True, "mlp_bias": True, "time_step_min": 0.2}),
    Arch("lfm2", "Lfm2", LFM2 | {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    Arch("lfm2_bias", "Lfm2",
         LFM2 | {"full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
                 "tie_word_embeddings": False}),
    Arch("falcon_h1", "FalconH1", FALCON),
    Arch("falcon_h1_scaled", "FalconH1",
         FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True,
                   "projectors_bias": True, "key_multiplier": 0.6, "attention_in_multiplier": 1.3,
                   "attention_out_multiplier": 0.8, "ssm_in_multiplier": 0.7, "ssm_out_multiplier": 1.2,
                   "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.5], "mlp_multipliers": [0.7, 1.4],
                   "embedding_multiplier": 2.0, "lm_head_multiplier": 1.5}),
    Arch("qwen3_next", "Qwen3Next", DELTA),
    Arch("qwen3_next_some_dense", "Qwen3Next",
         DELTA | {"linear_num_key_heads": 6, "linear_conv_kernel_dim": 3, "attention_bias": True,
                  "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False,
                  "tie_word_embeddings": True,
                  "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    Arch("qwen3_5", "Qwen3_5Text",
         {n: v for n, v in DELTA.items() if "expert" not in n and "moe" not in n}
         | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}),
    Arch("falcon_h1_normed", "FalconH1", FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 1}),
)  # fmt: skip


def saved(arch: Arch, folder: Path) -> torch.nn.Module:
    """The model, and its checkpoint in a folder."""
    torch.manual_seed(sum(map(ord, arch.name)))
    config = getattr(transformers, f"{arch.model}Config")(**arch.config)
    model = getattr(transformers, f"{arch.model.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and "A_log" not in name:  # constants would hide a mix-up
                p += 0.3 * torch.randn(p.shape)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def checked(model: torch.nn.Module, prompt: Sequence[int], output: Any, greedy: bool = True) -> None:
    """An output's tokens have the chances that transformers gives them; greedy: and are those that it chooses."""
    tokens = list(output.token_ids)
    assert len(tokens) == N_TOKENS
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    expected = torch.log_softmax(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double(), -1)
    if greedy:
        assert tokens == expected.argmax(-1).tolist()
    found = torch.tensor([chances[token].logprob for token, chances in zip(tokens, output.logprobs, strict=True)])
    torch.testing.assert_close(found.double(), expected[range(N_TOKENS), tokens], atol=2e-4, rtol=0)


def _settings(backend: str) -> dict[str, Any]:
    """Three slots, and steps of at most 16 tokens."""
    return {
        "target": "cuda" if ON_GPU else "cpu", "backend": backend, "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 16,
        "kv_cache_memory_bytes": CACHE,
    }  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((backend, arch), id=f"{backend}-{arch.name}", marks=marks)
        for backend, marks in (("eager", ()), ("prebuilt", pytest.mark.thorough), ("inductor", pytest.mark.slow))
        for arch in ARCHS
    ],
)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """A checkpoint's model of transformers, and an engine with three slots and steps of at most 16 tokens."""
    backend, arch = request.param
    folder = tmp_path_factory.mktemp(arch.name)
    model = saved(arch, folder)
    llm = LLM(str(folder), **_settings(backend))
    yield model, llm
    llm.close()


class Drafts:
    """A proposer that knows what comes: of its drafts, the one at `wrong` is not it."""

    known: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # greedy tokens by prompt
    wrong: ClassVar[int] = 0

    def __init__(self, settings: Any) -> None:
        """Takes no settings."""

    def propose(self, id: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        right = self.known[tuple(prompt)][len(output) :][:count]
        return [(t + (i == self.wrong)) % V for i, t in enumerate(right)]

    def end(self, id: str, output: Sequence[int]) -> None:
        """Keeps nothing."""


def outputs(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[Any]]:
    """The outputs of each prompt."""
    usual = {"temperature": 0, "max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 1}
    sampling = SamplingParams(**usual | params)
    made = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    return [list(output.outputs) for output in made]


def drawn(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]


def test_alone(asked: tuple[Any, LLM]) -> None:
    model, llm = asked
    for prompt in drawn(1, 1, 2, 3, 17):
        ((output,),) = outputs(llm, [prompt])
        checked(model, prompt, output)


def test_many_in_few_slots_and_again(asked: tuple[Any, LLM]) -> None:
    """More requests than slots, prompts in several steps, beside others that decode; then from the cache."""
    model, llm = asked
    prompts = drawn(2, 1, 62, 16, 33, 5, 48, 15, 64)
    first = outputs(llm, prompts)
    for prompt, (output,) in zip(prompts, first, strict=True):
        checked(model, prompt, output)
    assert len({t for (output,) in first for t in output.token_ids}) > 8, "the model repeats itself, which tests little"
    again = outputs(llm, prompts)
    assert [list(a.token_ids) for (a,) in again] == [list(f.token_ids) for (f,) in first]


def test_prompts_that_begin_alike(asked: tuple[Any, LLM]) -> None:
    """At each boundary of a block and beside it."""
    model, llm = asked
    (shared, *rests) = drawn(3, 64, 5, 9, 1, 20)
    for cut in (15, 16, 17, 32, 48, 64):
        for rest in rests:
            prompt = shared[:cut] + rest
            ((output,),) = outputs(llm, [prompt])
            checked(model, prompt, output)


def test_several_answers_of_a_prompt(asked: tuple[Any, LLM]) -> None:
    model, llm = asked
    (prompt,) = drawn(4, 37)
    answers = outputs(llm, [prompt], n=3, temperature=1.0, seed=7)[0]
    for output in answers:
        checked(model, prompt, output, greedy=False)
    assert len({tuple(output.token_ids) for output in answers}) == 3


HYBRIDS = ("mamba2", "granite_hybrid", "lfm2", "falcon_h1", "qwen3_next")


@pytest.mark.parametrize("backend", ["eager", pytest.param("prebuilt", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("arch", [a for a in ARCHS if a.name in HYBRIDS], ids=lambda a: a.name)
def test_drafts_rejected_at_each_place(arch: Arch, backend: str, tmp_path: Path) -> None:
    """Three drafts a step; the first that is wrong stands at each place, or nowhere. Others wait for a slot."""
    model = saved(arch, tmp_path)
    plain = LLM(str(tmp_path), **_settings("eager"))
    prompts = drawn(5, 1, 20, 47, 9)
    Drafts.known = {tuple(p): list(o.token_ids) for p, (o,) in zip(prompts, outputs(plain, prompts), strict=True)}
    plain.close()
    llm = LLM(str(tmp_path), **_settings(backend), num_speculative_tokens=3, draft_proposer=Drafts)
    for wrong in range(4):
        Drafts.wrong = wrong
        for prompt, (output,) in zip(prompts, outputs(llm, prompts), strict=True):
            checked(model, prompt, output)
    counted = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 40
    llm.close()
