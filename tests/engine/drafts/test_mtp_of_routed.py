"""MTP layers of DeepSeek-V3's kind and of GLM-4.5's as drafts, in every step of an engine, against transformers' layers
put together as published checkpoints name their parts; and the text, which drafts must not change: over a cache of
latents, too, by runs and by trees."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.config.token_tree import token_tree
from graphllm.loading.checkpoint.source import open_source
from tests.artifacts import LIMITS, artifact_of
from tests.engine.drafts import test_draft_models as drafts
from tests.engine.drafts.test_draft_models import COUNT, DRAFTS, LEN, TREE, Known, Method, Ranked, V
from tests.engine.drafts.test_mtp_of_hybrids import _drawn, _open, _texts
from tests.engine.harness import GREEDY, finish, open_core, request, verify_all_drafts
from tests.tiers import ON_GPU, both_tiers, thorough

LAYERS = 2
INNER = 24 if ON_GPU else 20  # of an expert: kernels for a GPU take multiples of 8
MANY = (40, 31, 8, 39, 16, 52, 1)  # tokens of prompts
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": LEN, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "first_k_dense_replace": 1, "moe_intermediate_size": INNER, "n_routed_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.3, "tie_word_embeddings": False,
}  # fmt: skip
LATENTS = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}  # fmt: skip
INDEXED = {"index_topk": 8, "index_n_heads": 24, "index_head_dim": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", LATENTS),
    "glm4_moe": ("Glm4Moe", {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "wide": (
        "DeepseekV3",
        {
            "hidden_size": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
        },
    ),
    "deepseek_v32": ("DeepseekV32", LATENTS | INDEXED),
    "glm_moe_dsa": ("GlmMoeDsa", LATENTS | INDEXED | {"n_group": 1, "mlp_layer_types": ["dense", "sparse"]}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENTS | {"n_group": 1, "mlp_layer_types": ["dense", "sparse"]}),
}


def _config(family: str, **fields: Any) -> Any:
    name, own = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**SIZES | own | fields, attn_implementation="eager")


class Mtp:
    """The parts of an MTP layer: transformers' layer with experts and its last norm, as a model of one layer. own:
    whether it has another embedding and another head than the model."""

    def __init__(self, family: str, own: bool = False) -> None:
        fields = {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in FAMILIES[family][1] else {}
        one = _config(family, num_hidden_layers=1, first_k_dense_replace=0, **fields)
        self.layer = _drawn(getattr(transformers, f"{FAMILIES[family][0]}Model")(one), 7)
        draw = torch.Generator().manual_seed(8)
        for name, buffer in self.layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=draw))
        D = one.hidden_size
        self.joint = torch.cat([torch.eye(D), 0.2 * torch.randn(D, D, generator=draw)], 1)
        self.norms = {n: 1 + 0.2 * torch.randn(D, generator=draw) for n in ("enorm", "hnorm")}
        tables = ("embed_tokens", "shared_head.head") if own else ()
        self.tables = {n: torch.randn(V, D, generator=draw) for n in tables}
        self.eps = one.rms_norm_eps

    def tensors(self, model: Any, stacked: bool) -> dict[str, Tensor]:
        """As checkpoints have them: also the model's embedding and head. stacked: matrices of experts as one tensor."""
        start = f"model.layers.{LAYERS}."
        found = {f"{start}{n}.weight": w for n, w in self.norms.items()} | {f"{start}eh_proj.weight": self.joint}
        copies = {"embed_tokens": model.model.embed_tokens.weight, "shared_head.head": model.lm_head.weight}
        found |= {f"{start}{n}.weight": w.clone() for n, w in (copies | self.tables).items()}
        found[f"{start}shared_head.norm.weight"] = self.layer.norm.weight
        for name, p in self.layer.state_dict().items():
            kind, inner = name.rpartition(".")[2], name.removeprefix("layers.0.")
            if inner == name:
                continue
            if stacked or kind not in ("gate_up_proj", "down_proj"):
                found[start + inner] = p
                continue
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for n, matrix in enumerate(p):
                of = f"{start}{inner.removesuffix(kind)}{n}."
                rows = matrix.chunk(len(parts))
                found |= {f"{of}{part}.weight": m for part, m in zip(parts, rows, strict=True)}
        return {n: t.contiguous() for n, t in found.items()}

    def run(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Hidden states [T, D] of the embeddings of next tokens and of the model's hidden states."""

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

        joined = torch.cat([normed(tokens, self.norms["enorm"]), normed(rows, self.norms["hnorm"])], -1) @ self.joint.T
        return self.layer(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]


def _method(mtp: Mtp) -> Method:
    def run_of(model: Any) -> drafts.Run:
        tokens = mtp.tables.get("embed_tokens", model.model.embed_tokens.weight)
        head = mtp.tables.get("shared_head.head", model.lm_head.weight)

        def run(ids: list[int], rows: Tensor) -> tuple[Tensor, Ranked]:
            x = mtp.run(tokens[ids], rows)
            return x, drafts.ranked(head @ x[-1])

        return run

    def drafted(model: Any, known: Known, count: int) -> list[int]:
        return drafts._again(known, count, known.last, run_of(model))

    def behind(model: Any, known: Known, path: Any) -> Ranked:
        return drafts._behind(known, path, known.last, run_of(model))

    return Method("mtp", {}, {}, drafted, None, behind)


def _model(family: str) -> Any:
    """Random, and mostly one circle of all tokens, so that the MTP layer is often right."""
    torch.manual_seed(3)
    model = _drawn(getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")(_config(family)), 5)
    model.model.embed_tokens.weight.normal_().mul_(3)
    model.lm_head.weight[torch.randperm(V).roll(1)] = model.model.embed_tokens.weight / 3
    return model


def _save(model: Any, mtp: Mtp, folder: Path, fp8: bool = False, **fields: Any) -> Path:
    """With the MTP layer's tensors, which transformers neither reads nor writes. fp8: its linear layers as DeepSeek-V3
    has them, in float8 by blocks; the layer then has these numbers."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    further = mtp.tensors(model, any(name.endswith("experts.gate_up_proj") for name in stored))
    if fp8:
        from tests.weights.quantized import FORMATS  # of packages that a machine with a GPU may lack

        blocks = FORMATS["fp8 blocks"]
        for name in [n for n in further if re.search(r"_proj\w*\.weight", n) and not n.endswith("eh_proj.weight")]:
            matrix = further.pop(name)  # a view of the layer's
            parts, numbers = blocks.encode(matrix)
            matrix.copy_(numbers)
            further |= {f"{name.removesuffix('weight')}{n}": t.contiguous() for n, t in parts.items()}
        fields["quantization_config"] = blocks.config
    save_file({**stored, **further}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1} | fields))
    return folder


@pytest.mark.parametrize(
    "family", ["deepseek_v3", *map(thorough, ("glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"))]
)
@torch.no_grad()
def test_drafts(family: str, tmp_path: Path) -> None:
    check_drafts(family, tmp_path)


def check_drafts(family: str, at: Path, pages: int = 12, **fields: Any) -> None:
    """Prompts in chunks, of many at once, over the ends of blocks, in slots used again; those that begin alike are
    found in the prefix cache. Drafts are rejected at each place. Then the text alone, with so few pages."""
    model, mtp = _model(family), Mtp(family)
    opened = _open(_save(model, mtp, at / "model"), _method(mtp), **fields)
    texts = _texts(model, MANY)
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
def test_own_tables(tmp_path: Path) -> None:
    """The layer's embedding and head are those of the checkpoint, but for copies of the model's."""
    model = _model("deepseek_v3")
    for own in (False, True):
        mtp = Mtp("deepseek_v3", own)
        folder = _save(model, mtp, tmp_path / str(own))
        found = open_source(folder, draft=folder, method="mtp").checkpoint
        assert found is not None
        assert {f"draft:mtp.{n}.weight" in found.tensors for n in ("embed_tokens", "lm_head")} == {own}
    opened = _open(folder, _method(mtp))
    assert drafts._run(opened, model, _texts(model, (9, 20))) > 5
    opened.core.close()


@pytest.mark.thorough
@torch.no_grad()
def test_float8(tmp_path: Path) -> None:
    """The layer's linear layers stay encoded, but for what joins its inputs, which no checkpoint encodes."""
    model, mtp = _model("deepseek_v3"), Mtp("deepseek_v3")
    folder = _save(model, mtp, tmp_path / "model", fp8=True)
    opened = _open(folder, _method(mtp))
    assert drafts._run(opened, model, _texts(model, (9, 20, 33))) > 5
    entries = json.loads((opened.place / "weights.json").read_text())["entries"]
    assert {"draft.layers.0.o.scales", "draft.layers.0.joint"} <= {e["name"] for e in entries}
    opened.core.close()


@torch.no_grad()
def test_checkpoints_without_one_such_layer(tmp_path: Path) -> None:
    model, mtp = _model("glm4_moe"), Mtp("glm4_moe")
    for count, message in ((0, "has no tensors of a further layer"), (2, "num_nextn_predict_layers is 2; MTP needs")):
        folder = _save(model, mtp, tmp_path / str(count), num_nextn_predict_layers=count)
        with pytest.raises(ConfigError, match=message):
            _open(folder, _method(mtp))


GROWING = str({"top_k": 2, "depth": 3, "drafts": 5})


@pytest.mark.parametrize(
    ("family", "tree", "backend"),
    [
        ("deepseek_v3", GROWING, "eager"),
        *(thorough(family, TREE, "eager") for family in ("deepseek_v3", "glm4_moe")),
        pytest.param("deepseek_v3", TREE, "inductor", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_trees(family: str, tree: str, backend: str, tmp_path: Path) -> None:
    check_trees(family, tree, tmp_path, MANY if both_tiers() else (31, 8, 33), backend=backend)


def check_trees(
    family: str, tree: str, at: Path, lengths: Sequence[int] = MANY, pages: int = 10, **fields: Any
) -> None:
    """Every node's draft, whatever was kept before; and the text, with prefixes found in the cache and with so few
    pages."""
    model, mtp = _model(family), Mtp(family)
    fields = {"speculative_token_tree": tree, "num_speculative_tokens": 0, **fields}
    opened = _open(_save(model, mtp, at / "model"), _method(mtp), **fields)
    texts = _texts(model, lengths)
    assert drafts._run(opened, model, texts, token_tree(tree)) > 5
    assert drafts._run(opened, model, texts[1:] + texts[:1], token_tree(tree)) > 5
    stats = opened.core.stats()
    assert stats.prefix_hits > 0
    assert stats.drafts > stats.accepted_tokens[-1] > 0
    opened.core.close()
    drafts.check_with_few_blocks(opened, texts, pages)


def check_text(at: Path, tree: str | None, **fields: Any) -> None:
    """Of a model whose next token is never in doubt, so that rounding changes nothing, with an MTP layer that knows
    three of four tokens."""
    model, mtp = _model("wide"), Mtp("wide")
    wrong = model.model.embed_tokens.weight.clone()
    wrong[::4] = wrong[::4].roll(1, 0)
    mtp.tables["embed_tokens"] = wrong
    speculation = {"speculative_token_tree": tree, "num_speculative_tokens": 0} if tree else {}
    opened = _open(_save(model, mtp, at / "model"), _method(mtp), **speculation, **fields)
    texts = _texts(model, MANY)
    params = GREEDY.__class__(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    found = finish(opened.core, [request(str(i), t.prompt, params) for i, t in enumerate(texts)])
    assert [found[str(i)].tokens for i in range(len(texts))] == [t.answer for t in texts]
    stats = opened.core.stats()
    assert stats.drafts > stats.accepted_tokens[0] > stats.accepted_tokens[-1] > 0
    opened.core.close()


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.thorough
@torch.no_grad()
def test_text_in_bfloat16(tree: str | None, tmp_path: Path) -> None:
    check_text(tmp_path, tree, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.thorough
@torch.no_grad()
def test_latents_in_8_bits(dtype: str, tree: str | None, tmp_path: Path) -> None:
    """The text is that of the same cache without drafts."""
    model, mtp = _model("deepseek_v3"), Mtp("deepseek_v3")
    folder = _save(model, mtp, tmp_path / "model")
    texts = _texts(model, (40, 31, 8, 39))
    params = GREEDY.__class__(temperature=0.0, max_tokens=24, ignore_eos=True)
    said = []
    for fields in ({"num_speculative_tokens": 0}, {"speculative_token_tree": tree} if tree else {}):
        drafter = None if "num_speculative_tokens" in fields else folder
        place = artifact_of(
            open_source(folder, draft=drafter, method=drafter and "mtp"), backend="eager", dtype="float32",
            kv_cache_dtype=dtype, **LIMITS, **({"num_speculative_tokens": 0 if tree else DRAFTS} | fields)
        )  # fmt: skip
        core = open_core(folder, place, 150, draft=drafter)
        found = finish(core, [request(str(i), t.prompt, params) for i, t in enumerate(texts)])
        said.append([found[str(i)].tokens for i in range(len(texts))])
        if drafter:
            assert sum(core.stats().accepted_tokens) > 5
        core.close()
    assert said[0] == said[1]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_two_ranks(family: str, tmp_path: Path) -> None:
    """The model's text, and as many drafts and right ones as on one rank. The layer's own head is divided."""
    model, mtp = _model(family), Mtp(family, own=True)
    folder = _save(model, mtp, tmp_path / "model")
    texts, params = _texts(model, (40, 8, 31)), SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    counts = []
    for degree in (1, 2):
        options: dict[str, Any] = {"backend": "eager", "target": "cpu", "skip_tokenizer_init": True, **LIMITS}
        speculation = {"method": "mtp", "num_speculative_tokens": DRAFTS}
        with LLM(
            folder, tensor_parallel_size=degree, dtype="float32", speculative_config=speculation, **options
        ) as llm:
            core: Any = llm.llm_engine.core
            verify_all_drafts(core)
            found = llm.generate([{"prompt_token_ids": t.prompt} for t in texts], params)
            assert [o.outputs[0].token_ids for o in found] == [t.answer for t in texts]
            counts.append((core.stats().draft_tokens, core.stats().accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][0] > 20
