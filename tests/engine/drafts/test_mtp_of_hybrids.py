"""MTP layers of Qwen3-Next and Qwen3.5 as drafts, in every step of an engine, against transformers' layers put together
as published checkpoints name their parts; and the text, which drafts must not change."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.loading.checkpoint.source import open_source
from tests.artifacts import artifact_of
from tests.engine.drafts import test_draft_models as drafts
from tests.engine.drafts.test_draft_models import DRAFTS, LEN, D, Known, Method, Opened, Ranked, Text, V
from tests.engine.harness import open_core
from tests.tiers import ON_GPU, thorough

INNER = 24 if ON_GPU else 20  # of an expert: kernels for a GPU take multiples of 8
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": LEN, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": 24,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", EXPERTS),
    "qwen3_5": ("Qwen3_5", {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}),
    # As published: the shared expert is as wide as the others, and becomes one of them.
    "qwen3_5_moe": ("Qwen3_5Moe", EXPERTS | {"shared_expert_intermediate_size": INNER}),
}


def _config(family: str, **fields: Any) -> Any:
    name, own = FAMILIES[family]
    text = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return text(**SIZES | own | fields, attn_implementation="eager")


def _drawn(module: torch.nn.Module, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        # Norms are stored around zero, but for a delta net's.
        spread = 0.2 if p.dim() == 1 or name.endswith("A_log") else p.shape[-1] ** -0.5
        p.add_(spread * torch.randn(p.shape, generator=draw))
    return module.eval().requires_grad_(False)


class Mtp:
    """The parts of an MTP layer: transformers' layer with attention and its last norm, as a model of one layer."""

    def __init__(self, family: str) -> None:
        one = _config(family, num_hidden_layers=1, layer_types=["full_attention"])
        self.model = getattr(transformers, f"{FAMILIES[family][0]}TextModel", None) or getattr(
            transformers, f"{FAMILIES[family][0]}Model"
        )
        self.layer = _drawn(self.model(one), 7)
        draw = torch.Generator().manual_seed(8)
        self.fc = torch.cat([torch.eye(D), 0.2 * torch.randn(D, D, generator=draw)], 1)
        self.norms = {n: 0.2 * torch.randn(D, generator=draw) for n in ("embedding", "hidden")}
        self.eps = one.rms_norm_eps

    def tensors(self, stacked: bool) -> dict[str, Tensor]:
        """As checkpoints have them. stacked: matrices of experts as one tensor."""
        found = {"mtp.fc.weight": self.fc}
        found |= {f"mtp.pre_fc_norm_{n}.weight": w for n, w in self.norms.items()}
        for name, p in self.layer.state_dict().items():
            kind = name.rpartition(".")[2]
            if name.startswith("embed_tokens"):
                continue
            if stacked or kind not in ("gate_up_proj", "down_proj"):
                found[f"mtp.{name}"] = p
                continue
            for n, matrix in enumerate(p):
                parts = matrix.chunk(2) if kind == "gate_up_proj" else [matrix]
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                start = f"mtp.{name.removesuffix(kind)}{n}."
                found |= {f"{start}{part}.weight": m for part, m in zip(names, parts, strict=True)}
        return {n: t.contiguous() for n, t in found.items()}

    def run(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Hidden states [T, D] of the embeddings of next tokens and of the model's hidden states."""

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + weight)

        joint = [normed(tokens, self.norms["embedding"]), normed(rows, self.norms["hidden"])]
        joined = torch.cat(joint, -1) @ self.fc.T
        return self.layer(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]


def _method(mtp: Mtp) -> Method:
    def run_of(model: Any) -> drafts.Run:
        def run(ids: list[int], rows: Tensor) -> tuple[Tensor, Ranked]:
            x = mtp.run(model.model.embed_tokens.weight[ids], rows)
            return x, drafts.ranked(model.lm_head.weight @ x[-1])

        return run

    def drafted(model: Any, known: Known, count: int) -> list[int]:
        return drafts._again(known, count, known.last, run_of(model))

    return Method("mtp", {}, {}, drafted)


def _model(family: str) -> Any:
    """Random, and mostly one circle of all tokens, so that the MTP layer is often right."""
    torch.manual_seed(3)
    name = FAMILIES[family][0]
    model = _drawn(getattr(transformers, f"{name}ForCausalLM")(_config(family)), 5)
    model.model.embed_tokens.weight.normal_().mul_(3)
    model.lm_head.weight[torch.randperm(V).roll(1)] = model.model.embed_tokens.weight / 3
    return model


def _save(model: Any, mtp: Mtp, folder: Path, **fields: Any) -> Path:
    """With the MTP layer's tensors, which transformers neither reads nor writes."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    stacked = any(name.endswith("experts.gate_up_proj") for name in stored)
    save_file({**stored, **mtp.tensors(stacked)}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def _open(folder: Path, method: Method, **fields: Any) -> Opened:
    place = artifact_of(
        open_source(folder, draft=folder, method="mtp"),
        **{"backend": "eager", "dtype": "float32", "max_model_len": LEN, "max_num_seqs": 4,
           "max_num_batched_tokens": 32, "block_size": 8, "num_speculative_tokens": DRAFTS, **fields}
    )  # fmt: skip
    return Opened(open_core(folder, place, 150, draft=folder, snapshots=20), method, folder, folder, place)


def _texts(model: Any, lengths: Sequence[int]) -> list[Text]:
    found = []
    for text in drafts._texts(model, 1, lengths):
        ids = torch.tensor([[*text.prompt, *text.answer]])
        found.append(text._replace(states=[model.model(ids, use_cache=False).last_hidden_state[0]]))
    return found


@pytest.mark.parametrize("family", ["qwen3_5", *map(thorough, ("qwen3_next", "qwen3_5_moe"))])
@torch.no_grad()
def test_drafts(family: str, tmp_path: Path) -> None:
    check_drafts(family, tmp_path)


def check_drafts(family: str, at: Path, pages: int = 10, **fields: Any) -> None:
    """Prompts in chunks, of many at once, over the ends of blocks, in slots used again; those that begin alike are
    found in the prefix cache. Drafts are rejected at each place: recurrent states are rolled back by so many tokens.
    Then the text alone, with so few pages."""
    model, mtp = _model(family), Mtp(family)
    opened = _open(_save(model, mtp, at / "model"), _method(mtp), **fields)
    texts = _texts(model, (40, 31, 8, 39, 16, 52, 1))
    assert drafts._run(opened, model, texts) > 20
    assert drafts._run(opened, model, texts[3:] + texts[:2]) > 10
    stats = opened.core.stats()
    assert stats.prefix_hits > 0
    kept = [stats.drafts, *stats.accepted_tokens]
    assert all(before > after for before, after in itertools.pairwise(kept))
    assert kept[-1] > 0
    opened.core.close()
    drafts.check_with_few_blocks(opened, texts, pages)


@torch.no_grad()
def test_checkpoints_without_one_such_layer(tmp_path: Path) -> None:
    model, mtp = _model("qwen3_5"), Mtp("qwen3_5")
    for field, value, told in (
        ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers is 2; MTP needs a checkpoint with one such layer"),
        ("mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings is True"),
    ):
        folder = _save(model, mtp, tmp_path / field, **{field: value})
        with pytest.raises(ConfigError, match=told):
            _open(folder, _method(mtp))


@torch.no_grad()
def test_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """The layer lies beside the text model there, and is found by the same names."""
    folder = _save(_model("qwen3_5"), Mtp("qwen3_5"), tmp_path / "model")
    plain = open_source(folder, draft=folder, method="mtp")
    assert plain.checkpoint is not None
    file = folder / "model.safetensors"
    stored = {n: f"model.language_model.{n.removeprefix('model.')}" for n in load_file(file) if n.startswith("model.")}
    save_file({stored.get(n, n): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (folder / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": False}))
    found = open_source(folder, draft=folder, method="mtp")
    assert found.checkpoint is not None
    assert set(found.checkpoint.tensors) == set(plain.checkpoint.tensors)
    assert "draft:mtp.fc.weight" in found.checkpoint.tensors
