"""Encoders against transformers on tiny random checkpoints: vectors, vectors of tokens and classes of ragged batches,
in float32. The eager backend runs all of them, the compiled one a few."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphllm import LLM
from graphllm.compile.families import find_model
from graphllm.config import ConfigError
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.artifacts import artifact_of
from tests.models.sharded import Sharded
from tests.tiers import thorough

V, D, LENGTHS = 131, 64, (1, 7, 40, 512, 130, 2, 64)
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip
ROBERTA = SIZES | {"pad_token_id": 1, "max_position_embeddings": 514, "type_vocab_size": 1}
DISTIL = {"vocab_size": V, "dim": D, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "initializer_range": 0.15}
MODERN = SIZES | {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "local_attention": 32}
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}


@dataclass(frozen=True)
class Arch:
    """A checkpoint to make. modules: what its modules.json has behind the transformer."""

    name: str
    model: str
    config: dict[str, Any]
    pooling: str = "CLS"
    more: dict[str, Any] = field(default_factory=dict)
    old: bool = False


ARCHS = (
    Arch("bert_cls", "Bert", SIZES),
    Arch("bert_mean", "Bert", SIZES | {"hidden_act": "gelu_new", "num_attention_heads": 2}, "MEAN"),
    Arch("bert_last", "Bert", SIZES, "LAST"),
    Arch("bert_all", "Bert", SIZES | {"type_vocab_size": 1}, "ALL"),
    Arch("bert_classes", "BertForSequenceClassification", SIZES | {"num_labels": 3}),
    Arch("roberta_mean", "Roberta", ROBERTA, "MEAN"),
    Arch("roberta_classes", "RobertaForSequenceClassification", ROBERTA | {"num_labels": 1}),
    Arch("xlm_roberta_cls", "XLMRoberta", ROBERTA),
    Arch("xlm_roberta_classes", "XLMRobertaForSequenceClassification", ROBERTA),
    Arch("distilbert_mean", "DistilBert", DISTIL, "MEAN"),
    Arch("distilbert_classes", "DistilBertForSequenceClassification", DISTIL | {"num_labels": 4}),
    Arch("modernbert_cls", "ModernBert", MODERN),
    Arch("modernbert_mean_biases", "ModernBert", MODERN | BIASES, "MEAN"),
    Arch("modernbert_classes", "ModernBertForSequenceClassification", MODERN | {"num_labels": 5}),
    Arch("modernbert_classes_mean", "ModernBertForSequenceClassification",
         MODERN | BIASES | {"classifier_pooling": "mean", "global_attn_every_n_layers": 2}),
    Arch("nomic_bert", "NomicBert", SIZES, "MEAN"),
)  # fmt: skip


def make(arch: Arch, folder: Path) -> transformers.PreTrainedModel:
    """A random checkpoint, in a folder as sentence-transformers writes it."""
    torch.manual_seed(sum(map(ord, arch.name)))
    base = arch.model.removesuffix("ForSequenceClassification")
    config = getattr(transformers, base + "Config")(**arch.config)
    model = getattr(transformers, arch.model if arch.model != base else arch.model + "Model")(config).eval()
    for parameter in model.parameters():  # transformers begins with norms and biases that do nothing
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if arch.model == base:
        write_modules(folder, arch.pooling)
    return model


def write_modules(folder: Path, pooling: str, *more: str) -> None:
    """modules.json with pooling of that type (ALL is none), and further modules by their folders."""
    mode = {"CLS": "cls_token", "MEAN": "mean_tokens", "LAST": "lasttoken"}.get(pooling)
    paths = ["", *(["1_Pooling"] if mode else []), *more]
    kinds = {"": "Transformer", **{path: path.partition("_")[2] for path in paths[1:]}}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kinds[path]}"}
        for i, path in enumerate(paths)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if mode:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {f"pooling_mode_{m}": m == mode for m in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": D, **modes}))


def opened(folder: Path, backend: Literal["eager", "inductor"], **settings: Any) -> Executor:
    """The executor of a checkpoint, compiled with its own defaults but for what is given."""
    place, checkpoint = compiled(folder, backend, **settings)
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    return Executor(Artifact.open(place), load_weights(plan, checkpoint, "cpu"), num_blocks=2)


def compiled(folder: Path, backend: Literal["eager", "inductor"], **settings: Any) -> tuple[Path, Checkpoint]:
    """The artifact of a checkpoint, and what it reads."""
    source = open_source(folder, pooling_type=settings.pop("pooling_type", None))
    assert source.checkpoint is not None
    place = artifact_of(source, backend=backend, jobs=1, **{"dtype": "float32", **settings})
    compiled = Artifact.open(place).config
    assert compiled.max_model_len <= find_model(source.config).config(source.config).max_len
    return place, source.checkpoint


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [[4 + (i * 7 + n) % (V - 4) for i in range(n)] for n in lengths]


def expected(model: transformers.PreTrainedModel, pooling: str, prompt: list[int], types: Any = None) -> Tensor:
    """What transformers gives for a prompt by itself."""
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        found = model(torch.tensor([prompt]), **given)
    if hasattr(found, "logits"):
        return found.logits[0]
    states: Tensor = found.last_hidden_state[0]
    pooled: dict[str, Callable[[], Tensor]] = {
        "CLS": lambda: states[0], "LAST": lambda: states[-1], "MEAN": lambda: states.mean(0), "ALL": lambda: states,
    }  # fmt: skip
    return pooled[pooling]()


def run(executor: Executor | Sharded, prompts: list[list[int]], **arrays: np.ndarray) -> list[Tensor]:
    """The vectors of a ragged batch, by prompt."""
    step = ragged(prompts, [0] * len(prompts))
    result = executor.run(step._replace(arrays={**step.arrays, **arrays}))
    pooled = torch.from_numpy(result.outputs["pooled"]).float()
    if executor.vector[0] == "T":
        return list(pooled.split([len(p) for p in prompts]))
    return list(pooled)


def check(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    cosine = torch.nn.functional.cosine_similarity(found.double(), wanted.double(), dim=-1)
    assert (cosine > 1 - 1e-5).all()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)


FIRST = ("bert_classes", "modernbert_classes_mean", "nomic_bert")  # of what is divided, in every run


@pytest.mark.parametrize("arch", ARCHS, ids=lambda a: a.name)
def test_beside_transformers(arch: Arch, tmp_path: Path) -> None:
    model = make(arch, tmp_path)
    executor = opened(tmp_path, "eager")
    assert executor.layout.stateless
    for batch in (prompts_of(), prompts_of((3,)), prompts_of((1, 1))):
        for found, prompt in zip(run(executor, batch), batch, strict=True):
            check(found, expected(model, arch.pooling, prompt))
    executor.close()


@pytest.mark.parametrize(
    ("arch", "ranks", "backend"),
    [
        *((pytest.param if a.name in FIRST else thorough)(a, 2, "eager", id=f"{a.name}-2") for a in ARCHS),
        pytest.param(next(a for a in ARCHS if a.name == "bert_all"), 4, "eager", id="bert_all-4"),
        *(
            pytest.param(a, 2, "inductor", id=f"{a.name}-compiled", marks=pytest.mark.slow)
            for a in ARCHS
            if a.name in ("bert_mean", "modernbert_mean_biases", "nomic_bert")
        ),
    ],
)
def test_divided_among_ranks(arch: Arch, ranks: int, backend: Literal["eager", "inductor"], tmp_path: Path) -> None:
    """Every rank has its heads and its part of the feed-forward network, and gives whole vectors."""
    model = make(arch, tmp_path)
    place, checkpoint = compiled(tmp_path, backend, tensor_parallel_size=ranks)
    batch = prompts_of((1, 7, 40, 130))
    with Sharded(place, checkpoint, ranks, 2) as together:
        sizes = [sum(t.numel() for t in weights.values()) for weights in together.weights]
        assert len(set(sizes)) == 1
        assert sizes[0] < 0.75 * sum(p.numel() for p in model.parameters())
        for found, prompt in zip(run(together, batch), batch, strict=True):
            check(found, expected(model, arch.pooling, prompt))
        assert together.group.calls > 0


@pytest.mark.parametrize(
    "degrees", [pytest.param({"tensor_parallel_size": 2}, id="tp"), thorough({"pipeline_parallel_size": 2}, id="pp")]
)
def test_processes(degrees: dict[str, int], tmp_path: Path) -> None:
    """An engine of two ranks, more prompts than a step takes."""
    model = make(next(a for a in ARCHS if a.name == "modernbert_classes"), tmp_path)
    prompts = prompts_of((1, 7, 40, 130, 300) * 4)
    options = {"target": "cpu", "backend": "eager", "dtype": "float32", "skip_tokenizer_init": True, **degrees}
    with LLM(tmp_path, max_num_batched_tokens=512, **options) as llm:
        outputs = llm.encode([{"prompt_token_ids": ids} for ids in prompts], pooling_task="classify")
    for output, prompt in zip(outputs, prompts, strict=True):
        wanted = expected(model, "CLS", prompt).softmax(-1)
        torch.testing.assert_close(torch.as_tensor(output.outputs.data), wanted, rtol=1e-4, atol=1e-5)


COMPILED = [
    pytest.param(a, marks=[] if a.name == "bert_mean" else [pytest.mark.slow], id=a.name)
    for a in ARCHS
    if a.name in ("bert_mean", "modernbert_classes_mean", "nomic_bert", "distilbert_classes")
]


@pytest.mark.parametrize("arch", COMPILED)
def test_compiled(arch: Arch, tmp_path: Path) -> None:
    model = make(arch, tmp_path)
    executor = opened(tmp_path, "inductor")
    for batch in (prompts_of(), prompts_of((1,))):
        for found, prompt in zip(run(executor, batch), batch, strict=True):
            check(found, expected(model, arch.pooling, prompt))
    executor.close()


def test_two_texts(tmp_path: Path) -> None:
    """A cross-encoder is told by token types which tokens are of the second text; what is not told is of the first."""
    model = make(next(a for a in ARCHS if a.name == "bert_classes"), tmp_path)
    executor = opened(tmp_path, "eager")
    prompts = prompts_of((9, 30))
    types = [[0] * 4 + [1] * 5, [0] * 30]
    found = run(executor, prompts, token_types=np.array([t for row in types for t in row], dtype=np.int32))
    for vector, prompt, row in zip(found, prompts, types, strict=True):
        check(vector, expected(model, "", prompt, row))
    assert not torch.allclose(found[0], run(executor, prompts)[0], atol=1e-3)
    executor.close()


def test_dense_layers(tmp_path: Path) -> None:
    """Two dense layers behind the mean, in folders of their own."""
    model = make(Arch("bert_dense", "Bert", SIZES, "MEAN"), tmp_path)
    write_modules(tmp_path, "MEAN", "2_Dense", "3_Dense", "4_Normalize")
    g = torch.Generator().manual_seed(1)
    layers = []
    for folder, rows, columns, bias, activation in (
        ("2_Dense", 48, D, True, "torch.nn.modules.activation.Tanh"),
        ("3_Dense", 20, 48, False, "torch.nn.modules.linear.Identity"),
    ):
        tensors = {"linear.weight": torch.randn(rows, columns, generator=g) / columns**0.5}
        if bias:
            tensors["linear.bias"] = torch.randn(rows, generator=g)
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        told = {"in_features": columns, "out_features": rows, "bias": bias, "activation_function": activation}
        (tmp_path / folder / "config.json").write_text(json.dumps(told))
        layers.append(tensors)
    executor = opened(tmp_path, "eager")
    assert executor.vector == ("R", 20)
    prompts = prompts_of((3, 50))
    for found, prompt in zip(run(executor, prompts), prompts, strict=True):
        x = torch.tanh(torch.nn.functional.linear(expected(model, "MEAN", prompt), *layers[0].values()))
        check(found, layers[1]["linear.weight"] @ x)
    executor.close()


def test_colbert(tmp_path: Path) -> None:
    """A vector for each token, through the projection of the checkpoint."""
    model = make(Arch("bert", "Bert", SIZES), tmp_path)
    (tmp_path / "modules.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"], "dim": 24}))
    tensors = {f"bert.{n}": t for n, t in load_file(tmp_path / "model.safetensors").items()}
    projection = torch.randn(24, D, generator=torch.Generator().manual_seed(2)) / 8
    save_file({**tensors, "linear.weight": projection}, tmp_path / "model.safetensors")
    executor = opened(tmp_path, "eager")
    assert executor.vector == ("T", 24)
    prompts = prompts_of((5, 1, 70))
    for found, prompt in zip(run(executor, prompts), prompts, strict=True):
        check(found, expected(model, "ALL", prompt) @ projection.T)
    executor.close()


def test_other_forms_of_the_files(tmp_path: Path) -> None:
    """Nomic-BERT with the config.json of its authors, an older one of ModernBERT, and a BERT of the old days, whose
    norms have gamma and beta."""
    arch = next(a for a in ARCHS if a.name == "nomic_bert")
    model = make(arch, tmp_path / "nomic")
    theirs = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": D, "n_head": 4, "n_inner": 96,
        "n_layer": 3, "n_positions": 8192, "max_trained_positions": 512, "vocab_size": V, "type_vocab_size": 2,
        "layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "rotary_emb_base": 1000, "qkv_proj_bias": False,
        "rotary_emb_fraction": 1.0, "prenorm": False, "causal": False,
    }  # fmt: skip
    (tmp_path / "nomic" / "config.json").write_text(json.dumps(theirs))
    old = make(Arch("bert_old", "Bert", SIZES), tmp_path / "bert")
    tensors = load_file(tmp_path / "bert" / "model.safetensors")
    for ending, before in (("weight", "gamma"), ("bias", "beta")):
        tensors = {n.replace(f"LayerNorm.{ending}", f"LayerNorm.{before}"): t for n, t in tensors.items()}
    save_file({f"bert.{n}": t for n, t in tensors.items()}, tmp_path / "bert" / "model.safetensors")
    modern = make(Arch("modern", "ModernBert", MODERN), tmp_path / "modern")
    config = json.loads((tmp_path / "modern" / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    older = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    (tmp_path / "modern" / "config.json").write_text(json.dumps(config | older))
    for folder, made, pooling in (("nomic", model, "MEAN"), ("bert", old, "CLS"), ("modern", modern, "CLS")):
        executor = opened(tmp_path / folder, "eager")
        prompts = prompts_of((33, 2))
        for found, prompt in zip(run(executor, prompts), prompts, strict=True):
            check(found, expected(made, pooling, prompt))
        executor.close()
    (tmp_path / "nomic" / "config.json").write_text(json.dumps(theirs | {"prenorm": True}))
    with pytest.raises(ConfigError, match="prenorm is True, which is not supported"):
        opened(tmp_path / "nomic", "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_mean", "modernbert_cls"])
def test_compiled_in_bfloat16(name: str, tmp_path: Path) -> None:
    """As close as 8 bits of a number let it be: transformers itself, in bfloat16, is as far from its own float32."""
    arch = next(a for a in ARCHS if a.name == name)
    model = make(arch, tmp_path)
    executor = opened(tmp_path, "inductor", dtype="bfloat16")
    prompts = prompts_of()
    exact = [expected(model, arch.pooling, p) for p in prompts]
    rounded = [expected(model.bfloat16(), arch.pooling, p).float() for p in prompts]
    found = run(executor, prompts)
    executor.close()
    ours, theirs = (
        sum(1 - torch.cosine_similarity(v, e, dim=0).item() for v, e in zip(vectors, exact, strict=True))
        for vectors in (found, rounded)
    )
    assert ours < 1.5 * theirs + 1e-4
