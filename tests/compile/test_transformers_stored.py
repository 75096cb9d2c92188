"""What checkpoints hold of transformers' modules: expressions over files as transformers reads them, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from graphllm.compile.transformers_model.checkpoint.converted import ConversionError, Convert
from graphllm.compile.transformers_model.checkpoint.stored import StoredWeights, with_stored
from graphllm.config import ConfigError
from graphllm.ir import Weight
from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.expr import Decode, Expr, Read, walk
from graphllm.weights.plan.match import check_checkpoint
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.schemes import as_quantized
from graphllm.weights.plan.simplify import Region, same_encodings
from tests.compile.transformers_sizes import random_model, tiny
from tests.tiers import thorough

# One of each form: plain, prefixes and ties; experts one by one, stacked, interleaved; renamed; fused and cut.
SAMPLE = (
    "llama", "gpt2", "gpt_neox", "bert", "qwen2_moe", "mixtral", "granitemoe", "gpt_oss", "nemotron_h", "hrm_text",
    "inkling2_text", "ernie4_5_moe", "deepseek_v4",
)  # fmt: skip
OTHERS = (
    "afmoe", "aria_text", "arcee", "axk1", "axk2", "bailing_hybrid", "bamba", "beam", "biogpt", "bitnet", "bloom",
    "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "diffllama", "doge", "dots1", "ernie4_5", "exaone4", "exaone_moe", "falcon", "falcon_mamba", "flex_olmo", "flint",
    "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gptj",
    "granite", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4",
    "jais2", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm3", "llama4_text", "mamba", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral", "mistral", "modernbert-decoder", "mpt",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma", "roberta", "rwkv",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm", "xlnet",
)  # fmt: skip


def on_meta(cls: type[Any], config: Any) -> Any:
    with torch.device("meta"):
        return cls(config)


def read_folder(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def evaluated(expr: Expr, tensors: Mapping[str, Tensor]) -> Tensor:
    def fetch(region: Region) -> Tensor:
        name = next(n for n in region.read.sources if n in tensors)
        assert tuple(tensors[name].shape) == region.read.stored
        return tensors[name][tuple(slice(a, b) for a, b in zip(region.starts, region.stops, strict=True))]

    return evaluate(expr, fetch)


def check(cls: type[Any], config: Any, folder: Path) -> None:
    """Every tensor of the model that transformers loads, made by its expression; and every tensor of the file read."""
    tensors, loaded = read_folder(folder), cls.from_pretrained(folder, dtype=torch.float32)
    stored, read = StoredWeights(on_meta(cls, config)), set()
    for name, expected in loaded.state_dict().items():
        expr = stored.of(name)
        torch.testing.assert_close(evaluated(expr, tensors), expected, rtol=0, atol=0, msg=f"{name}: {expr}")
        read |= {source for e in walk(expr) if isinstance(e, Read) for source in e.sources}
    assert set(tensors) <= read


@pytest.mark.parametrize("model_type", [*SAMPLE, *map(thorough, OTHERS)])
def test_a_saved_model_is_read_as_transformers_reads_it(model_type: str, tmp_path: Path) -> None:
    cls, config = tiny(model_type)
    random_model(cls, config).save_pretrained(tmp_path)
    check(cls, config, tmp_path)


OLD = {  # what files of older versions, or of the model without its head, have in place of a part of each name
    "without the prefix": ("gpt2", {r"^transformer\.": ""}),
    "with the prefix of the base model": ("phi3", {r"^model\.": "", r"^lm_head": "lm_head"}),
    "TensorFlow's names of norms": (
        "bert",
        {r"LayerNorm\.weight": "LayerNorm.gamma", r"LayerNorm\.bias": "LayerNorm.beta"},
    ),
    "a head of its own name": ("gpt_neox", {r"^lm_head\.": "embed_out."}),
    "a text model of a vision model": ("qwen3_5_text", {r"^model\.": "model.language_model."}),
    "names of the module": ("ernie4_5_moe", {r"mlp\.moe_statics\.e_score": "mlp.gate.moe_statics.e_score"}),
    "stacked experts of the first release": ("granitemoe", {r"experts\.gate_up_proj": "input_linear.weight"}),
}


@pytest.mark.parametrize("case", OLD)
def test_older_names_are_known(case: str, tmp_path: Path) -> None:
    model_type, changes = OLD[case]
    cls, config = tiny(model_type)
    random_model(cls, config).save_pretrained(tmp_path)
    tensors = read_folder(tmp_path)
    for pattern, by in changes.items():
        tensors = {re.sub(pattern, by, name): tensor for name, tensor in tensors.items()}
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(cls, config, tmp_path)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_of_two_tied_matrices_is_enough(kept: str, tmp_path: Path) -> None:
    cls, config = tiny("llama", tie_word_embeddings=True)
    random_model(cls, config).save_pretrained(tmp_path)
    tensors = read_folder(tmp_path)
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(cls, config, tmp_path)


def test_a_layer_index_stays_open() -> None:
    """Names with {layer} are those of every layer, also where experts have the layer's number."""
    stored = StoredWeights(on_meta(*tiny("mixtral")))
    for name in ("mlp.experts.gate_up_proj", "mlp.gate.weight", "self_attn.q_proj.weight"):
        open_name = f"model.layers.{{layer}}.{name}"
        of_all = stored.of(open_name, layer=0)
        for layer in (0, 1):
            of_one = stored.of(open_name.replace("{layer}", str(layer)))
            assert str(of_all).replace("{layer}", str(layer)) == str(of_one)


def test_merged_weights_keep_plain_names() -> None:
    """The sources of a weight stay sources where each is a tensor of the checkpoint."""
    stored = StoredWeights(on_meta(*tiny("mixtral")))
    attn = "model.layers.{layer}.self_attn."
    qkv = Weight(
        (64, 32), tuple(f"{attn}{n}_proj.weight" for n in "qkv"), (32, 16, 16), shard="output", heads=(4, 2, 2)
    )
    made = stored.replaced({"qkv": qkv, "one": Weight((96, 32), tie="embed.tokens")}, 1)
    assert made["qkv"].expr is None
    assert (made["qkv"].segments, made["qkv"].heads) == ((32, 16, 16), (4, 2, 2))
    assert [source[0] for source in made["qkv"].sources] == list(qkv.sources)
    assert made["one"].tie == "embed.tokens"


def test_merged_weights_of_converted_parameters(tmp_path: Path) -> None:
    """Sources that are made of several tensors, or of parts of one, become one expression."""
    cls, config = tiny("hrm_text")
    model = random_model(cls, config)
    model.save_pretrained(tmp_path)
    tensors, state = read_folder(tmp_path), model.state_dict()
    stem = "model.L_module.layers.1.self_attn."
    sources = tuple(f"{stem}{n}_proj.weight" for n in "qkv")
    rows = tuple(state[source].shape[0] for source in sources)
    weight = Weight((sum(rows), 32), sources, rows, shard="output", heads=(4, 4, 4))
    made = StoredWeights(on_meta(cls, config)).replaced({"qkv": weight})["qkv"]
    assert (made.sources, made.segments, made.shard, made.heads) == ((), rows, "output", (4, 4, 4))
    assert isinstance(made.expr, Expr)
    torch.testing.assert_close(evaluated(made.expr, tensors), torch.cat([state[s] for s in sources]), rtol=0, atol=0)
    cut = Weight((8, 32), sources[:1], slice_rows=(8, 16))
    rows_8 = StoredWeights(on_meta(cls, config)).replaced({"cut": cut})["cut"].expr
    assert isinstance(rows_8, Expr)
    torch.testing.assert_close(evaluated(rows_8, tensors), state[sources[0]][8:16], rtol=0, atol=0)


def test_quantized_experts_are_found() -> None:
    """Experts that a checkpoint stores one by one in float8 are decoded one by one, and can be taken as stored."""
    stored = StoredWeights(on_meta(*tiny("qwen3_moe")))
    expr = stored.of("model.layers.0.mlp.experts.gate_up_proj")
    plan = WeightPlan((Entry("layers.0.gate_up", expr.shape, "bfloat16", expr),))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 32]}}
    made = as_quantized(plan, config, None)["layers.0.gate_up"].expr
    assert sum(isinstance(e, Decode) for e in walk(made)) == 8
    assert all(same_encodings(part) for part in made.parts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mtp.layers.0.proj.weight", "model.mtp.layers.0.proj.weight", "model.mtp_layers.0.w"])
def test_layers_that_only_draft_are_not_missed(name: str, tmp_path: Path) -> None:
    """They are tensors that transformers' classes leave out; others are errors."""
    stored = StoredWeights(on_meta(*tiny("mimo_v2_flash")))
    expr = stored.of("model.norm.weight")
    plan = WeightPlan((Entry("head.norm", expr.shape, "bfloat16", expr),))
    save_file({"model.norm.weight": torch.ones(32), name: torch.ones(2)}, tmp_path / "model.safetensors")
    check_checkpoint(plan, Checkpoint.open(tmp_path))
    save_file({"model.norm.weight": torch.ones(32), f"x{name}": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="not used by the model"):
        check_checkpoint(plan, Checkpoint.open(tmp_path))


def test_refusals_name_the_parameter_and_the_operation() -> None:
    stored = StoredWeights(on_meta(*tiny("llama")))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*model\.rotary_emb\.inv_freq is no parameter"):
        stored.of("model.rotary_emb.inv_freq")
    with pytest.raises(ValueError, match=r"norm: model\.norm\.weight is \(32,\), not \(16,\)"):
        with_stored(
            "norm", Weight((16,), ("model.norm.weight",)), {"model.norm.weight": stored.of("model.norm.weight")}
        )
    unequal = StoredWeights(on_meta(*tiny("olmo_hybrid")))
    with pytest.raises(ConfigError, match=r"conv1d\.weight is converted by Concatenate\(dim=0\) of 3 tensors"):
        unequal.of("model.layers.0.linear_attn.conv1d.weight")


@pytest.mark.parametrize(
    "operations",
    [[Transpose(0, 1)], [Transpose(-1, 0), Concatenate(1)], [transformers.core_model_loading.Interleave(1)],
     [transformers.core_model_loading.Interleave(0, inverse=True)], [transformers.core_model_loading.PermuteForRope()],
     [transformers.core_model_loading.PermuteForRope(inverse=True)]],
    ids=str,
)  # fmt: skip
def test_operations_are_what_transformers_computes(operations: list[Any]) -> None:
    """Each operation on one tensor, against the operation itself."""
    config = transformers.LlamaConfig(num_attention_heads=2)
    for shape in ((12, 8), (8, 4)):
        tensor = torch.randn(shape)
        converter = WeightConverter(["a.weight"], ["b.weight"], operations)
        expected: dict[str, Any] = {"a.weight": tensor}
        for operation in operations:
            expected = operation.convert(
                expected, ["a.weight"], ["b.weight"], config=config, full_layer_name="b.weight"
            )
            expected = {"a.weight": expected["b.weight"]} if operation is not operations[-1] else expected
        wanted = expected["b.weight"]
        expr = Convert(converter, config, lambda s, n: ("a.weight",), lambda t: ()).expr(0, tuple(wanted.shape))
        torch.testing.assert_close(evaluated(expr, {"a.weight": tensor}), wanted, rtol=0, atol=0)


def test_an_operation_that_is_not_known_is_named() -> None:
    unknown = transformers.core_model_loading.ErnieFuseAndSplitTextVisionExperts()
    converter = WeightConverter(["a"], ["b"], [unknown])
    with pytest.raises(ConversionError, match="ErnieFuseAndSplitTextVisionExperts"):
        Convert(converter, transformers.LlamaConfig(), lambda s, n: ("a",), lambda t: ()).expr(0, (4, 4))
    checked = WeightConverter(["a"], ["b"], [Transpose(0, 1, check_dims=True)])
    with pytest.raises(ConversionError, match="check_dims"):
        Convert(checked, transformers.LlamaConfig(), lambda s, n: ("a",), lambda t: ()).expr(0, (4, 4))
