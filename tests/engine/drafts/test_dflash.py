"""DFlash against modules of transformers put together as the method's authors publish it: what it guesses in every step
of an engine, with which probabilities, and the text, which drafts must not change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.token_tree import token_tree
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from tests.engine.drafts.test_draft_models import (
    DRAFTS,
    EPS,
    LEN,
    TREE,
    D,
    F,
    Known,
    L,
    Method,
    Ranked,
    V,
    _made,
    _normal,
    _open,
    _run,
    _save,
    _texts,
    check_with_few_blocks,
    ranked,
)
from tests.engine.drafts.test_draft_models import made_model as made_circle
from tests.engine.harness import finish, request
from tests.tiers import COMPILED, ON_GPU, thorough

H, E, MASK, WINDOW = 4, 8, 96, 12
LAYERS, READS = 2, (1, 3)


class Layer(nn.Module):
    """Rows of a block see what is kept of known tokens, and each other; in causal layers those before them, and with a
    window no further back."""

    def __init__(self, config: Qwen3Config, causal: bool, window: int) -> None:
        super().__init__()
        self.causal, self.window = causal, window
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = Qwen3RMSNorm(E, EPS), Qwen3RMSNorm(E, EPS)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = Qwen3RMSNorm(D, EPS), Qwen3RMSNorm(D, EPS)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, before = self.input_layernorm(x), context.shape[1]
        every = torch.cat([context, rows], 1)  # only known tokens' hidden states are not normalized again

        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, E))

        q = self.q_norm(heads(self.q_proj(every))).transpose(1, 2)
        k = self.k_norm(heads(self.k_proj(every))).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        v = heads(self.v_proj(every)).transpose(1, 2)
        row, column = torch.arange(before, every.shape[1])[:, None], torch.arange(every.shape[1])[None, :]
        seen = column <= row if self.causal else column >= 0
        seen = seen & (column > row - self.window) if self.window else seen
        out = scaled_dot_product_attention(q[:, :, before:], k, v, attn_mask=seen)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: Qwen3Config, kinds: Sequence[tuple[bool, int]]) -> None:
        super().__init__()
        self.fc, self.hidden_norm = nn.Linear(len(READS) * D, D, bias=False), Qwen3RMSNorm(D, EPS)
        self.layers = nn.ModuleList(Layer(config, *kind) for kind in kinds)
        self.norm = Qwen3RMSNorm(D, EPS)
        self.angles = Qwen3RotaryEmbedding(config)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """The rows of the masks, of those of a block [1, N + 1, D] behind known tokens."""
        context = self.hidden_norm(self.fc(hidden))
        positions = torch.arange(context.shape[1] + x.shape[1])[None]
        cos, sin = self.angles(x, positions)
        for layer in self.layers:
            x = layer(x, context, cos, sin)
        return self.norm(x)[:, 1:]


def made_model() -> LlamaForCausalLM:
    """One number of each embedding tells masks from tokens."""
    made = made_circle()
    rows = made.model.embed_tokens.weight
    rows[:, 0], rows[MASK] = 2.0, 0.3 * rows[MASK]
    rows[MASK, 0] = -2.0
    return made


@torch.no_grad()
def dflash(model: LlamaForCausalLM, kind: str = "") -> Method:
    """Its first layer mostly copies the token that a block begins with to all masks, so that the first draft is often
    right, about a model that mostly goes round in a circle; all it sees besides decides the rest."""
    sliding, causal = kind == "sliding", True if kind == "causal" else None
    layer_types = ["full_attention", "sliding_attention" if sliding else "full_attention"]
    sizes = {
        "hidden_size": D, "vocab_size": V, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": E,
        "intermediate_size": F, "max_position_embeddings": LEN, "rms_norm_eps": EPS, "num_hidden_layers": LAYERS,
        "rope_theta": 10000.0, "layer_types": layer_types, "use_sliding_window": sliding, "sliding_window": WINDOW,
    }  # fmt: skip
    kinds = [(bool(causal), 0), (bool(causal) or sliding, WINDOW if sliding else 0)]
    drafter = Drafter(Qwen3Config(**sizes), kinds)
    for i, (name, w) in enumerate(drafter.named_parameters()):
        normal = _normal(40 + i)
        w.copy_(1 + normal(*w.shape) if w.dim() == 1 else normal(*w.shape))
        if name.endswith("down_proj.weight") or name == "layers.1.o_proj.weight":
            w.mul_(0.7)
    first = drafter.layers[0]
    assert isinstance(first, Layer)
    drafter.fc.weight[0] = 0
    for h in range(H):  # a slow rotation compares what tells masks from tokens
        for p, sign in ((first.q_proj, -8.0), (first.k_proj, 8.0)):
            p.weight[h * E + E // 2 - 1] = 0
            p.weight[h * E + E // 2 - 1, 0] = sign
    first.q_norm.weight[E // 2 - 1] = first.k_norm.weight[E // 2 - 1] = 1.9
    first.v_proj.weight.copy_(torch.eye(D) + 0.1 * first.v_proj.weight)
    first.o_proj.weight.copy_(1.5 * torch.eye(D) + 0.1 * first.o_proj.weight)

    @torch.no_grad()
    def logits(model: LlamaForCausalLM, known: Known, count: int) -> Tensor:
        hidden = torch.cat([known.layers[i + 1] for i in READS], -1)
        block = torch.tensor([[known.tokens[-1], *[MASK] * count]])
        return model.lm_head(drafter(model.model.embed_tokens(block), hidden[None]))[0]

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        found: list[int] = logits(model, known, count).argmax(-1).tolist()
        return found

    def behind(model: LlamaForCausalLM, known: Known, path: Sequence[int]) -> Ranked:
        return ranked(logits(model, known, DRAFTS)[len(path)])

    config = {
        **sizes, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "num_target_layers": L,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(READS)},
        **({"is_causal": True} if causal else {}),
    }  # fmt: skip
    w = {name: t.clone() for name, t in drafter.state_dict().items() if "inv_freq" not in name}
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    for name in [n for n in w if any(part in n for part in attention)]:
        start, number, rest = name.split(".", 2)
        w[f"{start}.{number}.self_attn.{rest}"] = w.pop(name)
    return Method("dflash", config, w, drafts, lambda model, known: logits(model, known, DRAFTS), behind)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return made_model()


def _check(opened: Any, model: LlamaForCausalLM, tree: str | None = None, pages: int = 34) -> None:
    """Prompts in chunks, over the ends of blocks, in slots used again, and found in the prefix cache; then with too few
    blocks, where some are computed twice."""
    texts = _texts(model, 1, (40, 31, 8, 39, 16, 52, 1))
    nodes = None if tree is None else token_tree(tree)
    assert _run(opened, model, texts, nodes) > 10
    assert _run(opened, model, texts[3:] + texts[:2], nodes) > 5
    stats = opened.core.stats()
    assert stats.prefix_hits > 0
    print(f"{stats.drafts} times, {stats.draft_tokens} drafts, accepted by place {stats.accepted_tokens}")
    assert 0.1 * stats.drafts < stats.accepted_tokens[0] < 0.98 * stats.drafts
    opened.core.close()
    check_with_few_blocks(opened, texts, pages)


@pytest.mark.parametrize("kind", ["", thorough("sliding"), pytest.param("causal", marks=pytest.mark.slow)])
def test_drafts(model: LlamaForCausalLM, kind: str, tmp_path: Path) -> None:
    _check(_open(model, dflash(model, kind), tmp_path), model, pages=60 if kind == "sliding" else 34)


@pytest.mark.thorough
def test_trees(model: LlamaForCausalLM, tmp_path: Path) -> None:
    fields = {"speculative_token_tree": TREE, "num_speculative_tokens": 0}
    _check(_open(model, dflash(model), tmp_path, **fields), model, TREE)


@COMPILED
@pytest.mark.parametrize("kind", ["", "sliding"])
def test_compiled_drafts(model: LlamaForCausalLM, kind: str, tmp_path: Path) -> None:
    fields = {"target": "cuda", "tune": False, "block_size": 16} if ON_GPU else {}
    pages = (60 if kind == "sliding" else 34) // (2 if ON_GPU else 1)
    _check(_open(model, dflash(model, kind), tmp_path, "inductor", **fields), model, pages=pages)


@pytest.mark.thorough
def test_probabilities(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Those that drawn drafts come from are the reference's, number by number."""
    method = dflash(model)
    core = _open(model, method, tmp_path, draft_sample_method="probabilistic").core
    (text,) = _texts(model, 5, (37,))
    finish(core, [request("0", text.prompt, SamplingParams(temperature=0.7, max_tokens=1, ignore_eos=True))])
    # The request ended with its first token, whose drafts were made all the same.
    first = int(core.executor.states.tensors["state.last_token"][0])
    known = text.known(len(text.prompt) - 1)
    assert known is not None
    assert method.first is not None
    expected = torch.softmax(method.first(model, known._replace(tokens=[*text.prompt, first])) / 0.7, -1)
    torch.testing.assert_close(core.executor.states.tensors["state.draft_probs"][0], expected, rtol=2e-4, atol=1e-6)
    core.close()


def test_settings(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """What a checkpoint says is found without being told, and what it cannot do is refused."""
    method = dflash(model)
    folder = _save(tmp_path / "model", {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}, {})
    source = open_source(folder, draft=_save(tmp_path / "draft", method.config, method.w))
    assert source.config["draft"]["method"] == "dflash"
    args = EngineArgs(target="cpu", backend="eager", max_num_seqs=4)
    assert compile_config(source.config, args).num_speculative_tokens == 7
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"num_speculative_tokens": 9}, "num_speculative_tokens is 9: the draft model guesses 7 tokens at once"),
        ({"dflash_config": {"target_layer_ids": [1, 9], "mask_token_id": 1}}, {}, "layer 9, the model has 6 layers"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, {}, "mask_token_id is missing"),
        ({"block_size": 64}, {}, "block_size is 64"),
    ]
    for i, (config, fields, told) in enumerate(wrong):
        with pytest.raises(ConfigError, match=told):
            _open(model, method._replace(config=method.config | config), _made(tmp_path / str(i)), **fields)
    both = dflash(model, "sliding")
    with pytest.raises(ConfigError, match="a window to both sides"):
        _open(model, both._replace(config=both.config | {"is_causal": False}), _made(tmp_path / "both"))
