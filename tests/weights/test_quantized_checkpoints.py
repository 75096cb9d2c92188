"""Quantized checkpoints of other programs: every format gives exactly the numbers that it stands for, whole models give
transformers' logits with these numbers, and what is broken is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphllm.compile.families import find_model
from graphllm.config import ConfigError, EngineArgs
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.weights.checkpoint.checkpoint import WeightError
from graphllm.weights.encodings import encoding_of
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.expr import Decode, Encode
from graphllm.weights.plan.match import check_checkpoint
from graphllm.weights.plan.plan import Entry, WeightPlan, make_plan
from graphllm.weights.plan.schemes import as_quantized, scheme_of
from graphllm.weights.plan.shard import shard_plan
from graphllm.weights.plan.simplify import same_encodings
from tests.models import driver, sharded
from tests.tiers import thorough
from tests.weights.quantized import FORMATS, GROUP, WIDTH, Format, symmetric, write


def _plan(folder: Path, random: bool = False) -> WeightPlan:
    """random: for random weights, which know nothing of the checkpoint's tensors."""
    source = open_source(folder)
    assert source.checkpoint is not None
    model = find_model(source.config)
    plan = make_plan(model, model.config(source.config), "float32")
    return as_quantized(plan, source.config, None if random else source.checkpoint.tensors)


def _loaded(folder: Path, plan: WeightPlan, rank: int = 0) -> dict[str, torch.Tensor]:
    checkpoint = open_source(folder).checkpoint
    assert checkpoint is not None
    return load_weights(plan, checkpoint, rank=rank)


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers(name: str, tmp_path: Path) -> None:
    stored = write(tmp_path, FORMATS[name]).state_dict()
    plan = _plan(tmp_path)
    weights = _loaded(tmp_path, plan)
    for i in range(2):
        at = f"model.layers.{i}."
        _same(weights[f"layers.{i}.qkv"], torch.cat([stored[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"]))
        _same(weights[f"layers.{i}.o"], stored[f"{at}self_attn.o_proj.weight"])
        _same(weights[f"layers.{i}.down"], stored[f"{at}mlp.down_proj.weight"])


@pytest.mark.parametrize("name", FORMATS)
def test_shares_of_two_ranks(name: str, tmp_path: Path) -> None:
    """They are kept as the whole is, and stand for their part of its numbers."""
    write(tmp_path, FORMATS[name], width=128, keys=4)
    plan = _plan(tmp_path)
    divided, weights = shard_plan(plan, 2), _loaded(tmp_path, plan)
    assert _kept(divided) == _kept(plan)
    ranks = [_loaded(tmp_path, divided, rank) for rank in range(2)]
    for entry in ("layers.0.o", "layers.0.down"):  # their inner entries are divided
        _same(torch.cat([rank[entry] for rank in ranks], 1), weights[entry])
    q, k, v = (torch.cat(parts) for parts in zip(*(r["layers.1.qkv"].split([32] * 3) for r in ranks), strict=True))
    _same(torch.cat([q, k, v]), weights["layers.1.qkv"])


def _kept(plan: WeightPlan) -> list[tuple[str, ...]]:
    """In which encodings ops read the divided weights."""
    found = (same_encodings(e.expr) for e in plan if e.shard in ("input", "output"))
    return [tuple(name for name in names if encoding_of(name).op is not None) for names in found]


def test_shares_that_cut_blocks_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FORMATS["awq"])
    with pytest.raises(ConfigError, match=r"layers.0.down is stored as awq-32 in blocks of 32 entries, and 96 / 2"):
        shard_plan(_plan(tmp_path), 2)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_repacked_for_kernels_stands_for_the_same_numbers(name: str, tmp_path: Path) -> None:
    stored = write(tmp_path, FORMATS[name]).state_dict()["model.layers.0.mlp.down_proj.weight"]
    plan, at = _plan(tmp_path), "layers.0.down"
    expr = plan[at].expr
    assert isinstance(expr, Decode)
    for other, _ in encoding_of(expr.encoding).repacked:
        encoding = encoding_of(other)
        entries = [
            Entry(f"{at}.{p.name}", p.shape(*stored.shape), p.dtype, Encode(other, p.name, expr))
            for p in encoding.parts
        ]
        weights = _loaded(tmp_path, plan.replace(at, *entries))
        parts = {p.name: weights[f"{at}.{p.name}"] for p in encoding.parts}
        _same(encoding.decode(parts, *stored.shape), stored)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gptq by activation", "awq", "fp8 blocks", "packed int4, zeros", "nf4 nested"])
def test_logits(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, FORMATS[name])
    runner = driver.Driver(tmp_path, "eager")
    prompt = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, _ = runner.generate([prompt], 1)
    torch.testing.assert_close(logits[0], model(torch.tensor([prompt])).logits[0, -1], atol=2e-4, rtol=0)


def _gpt_oss(folder: Path, width: int) -> transformers.GptOssForCausalLM:
    """A checkpoint with experts in MXFP4, and transformers' model by its own reader of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        head_dim=16, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM(config).eval()
    tensors = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter.detach().clone()
            continue
        count, inner, rows = parameter.shape
        blocks = torch.randint(0, 256, (count, rows, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (count, rows, inner // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | settings))
    return model


@torch.no_grad()
def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Their MXFP4 blocks, against transformers' own reader of them."""
    model, plan = _gpt_oss(tmp_path, 96), _plan(tmp_path)
    weights, stored = _loaded(tmp_path, plan), model.state_dict()
    for i in range(2):
        at = f"model.layers.{i}.mlp.experts."
        gate_up = stored[at + "gate_up_proj"].transpose(1, 2)
        _same(weights[f"layers.{i}.gate_up"], torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1))
        _same(weights[f"layers.{i}.down"], stored[at + "down_proj"].transpose(1, 2))
    for entry in _plan(tmp_path, random=True):  # random weights are kept as these are
        like = plan[entry.name]
        assert (entry.shape, entry.dtype, same_encodings(entry.expr)) == (
            like.shape, like.dtype, same_encodings(like.expr)
        ), entry.name  # fmt: skip


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize("apart", [False, True])
def test_ranks_keep_experts_of_gpt_oss_encoded(apart: bool, tmp_path: Path) -> None:
    """Divided by width or by number; what ranks compute together is what transformers does."""
    _compare_two_ranks(tmp_path, _gpt_oss(tmp_path, 128), apart, "e2m1-32")


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kept", "apart"),
    [
        ("awq", "nibble_zeros_f16-32", True),
        pytest.param("awq", "nibble_zeros_f16-32", False, marks=pytest.mark.slow),
        pytest.param("fp8 blocks", "float8-16", True, marks=pytest.mark.slow),
        pytest.param("fp8 blocks", "float8-16", False, marks=pytest.mark.slow),
    ],
)
def test_ranks_keep_single_experts_encoded(name: str, kept: str, apart: bool, tmp_path: Path) -> None:
    """Experts that the checkpoint stores one by one."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(3)
    model, tensors, made = transformers.Qwen3MoeForCausalLM(config).eval(), {}, FORMATS[name]
    for own, parameter in model.named_parameters():
        stem = own.removesuffix(".weight")
        if not own.endswith("proj.weight") and ".experts." not in own:
            tensors[own] = parameter.detach().clone()
            continue
        experts = parameter.data if parameter.dim() == 3 else parameter.data[None]
        for n, expert in enumerate(experts):
            halves = ("gate_proj", "up_proj") if stem.endswith("gate_up_proj") else (stem.rpartition(".")[2],)
            start = stem.rpartition(".")[0] + (f".{n}" if parameter.dim() == 3 else "")
            for leaf, part in zip(halves, expert.chunk(len(halves)), strict=True):
                stored, numbers = made.encode(part.float())
                tensors |= {f"{start}.{leaf}.{k}": t.clone().contiguous() for k, t in stored.items()}
                part.copy_(numbers)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": made.config}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | settings))
    _compare_two_ranks(tmp_path, model, apart, kept)


def _compare_two_ranks(folder: Path, model: Any, apart: bool, kept: str) -> None:
    """Their experts are kept in an encoding; what they compute together is what transformers does."""
    opened: list[Any] = []

    def ranks_of(place: Path, checkpoint: Any) -> Any:
        opened.append(sharded.Sharded(place, checkpoint, 2, num_blocks=64))
        return opened[0]

    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": apart}
    runner = driver.Driver(folder, "eager", settings=settings, opened=ranks_of)
    shown = {row["name"]: row["kept"] for row in Artifact.open(runner.place).manifest.weights}
    assert {shown["layers.*.gate_up"], shown["layers.*.down"]} == {kept}
    prompts = [torch.randint(128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 50)]
    with opened[0]:
        logits, _ = runner.generate(prompts, 2)
    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, model(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=0)


def test_experts_whose_width_cuts_blocks_are_divided_by_number(tmp_path: Path) -> None:
    _gpt_oss(tmp_path, 96)
    plan = _plan(tmp_path)
    with pytest.raises(ConfigError, match=r"layers.0.down is stored as .*96 / 2.*or enable_expert_parallel"):
        shard_plan(plan, 2)
    assert shard_plan(plan, 2, True)["layers.0.down"].shape == (2, 64, 96)


_SYMMETRIC = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}


@pytest.mark.parametrize(
    ("changes", "bits", "stored"),
    [
        ({}, 4, 8), ({}, 4, 7), thorough({"checkpoint_format": "gptq_v2"}, 4, 8),
        ({"checkpoint_format": "gptq_v2"}, 4, 7), ({"bits": 8}, 8, 128), thorough({"bits": 3}, 3, 4),
        thorough({"bits": 2}, 2, 1), (_AUTO_ROUND, 4, 8), ({"sym": False, "dynamic": {"+:.*": {"sym": True}}}, 4, 8),
        ({"sym": False}, 4, 7), ({"sym": False, "format": "gptq_v2"}, 4, 8),
    ],
)  # fmt: skip
def test_symmetric_ones_have_their_zero_point_in_the_middle(
    changes: dict[str, Any], bits: int, stored: int, tmp_path: Path
) -> None:
    """Programs store it by either convention, and say so or not."""
    numbers = write(tmp_path, Format(_SYMMETRIC | changes, symmetric(stored, bits))).state_dict()
    weights = _loaded(tmp_path, _plan(tmp_path))
    _same(weights["layers.1.down"], numbers["model.layers.1.mlp.down_proj.weight"])


def test_other_zero_points_contradict_symmetry(tmp_path: Path) -> None:
    made = FORMATS["gptq 4 bits"]
    write(tmp_path, made._replace(config=made.config | {"sym": True}))
    with pytest.raises(ConfigError, match=r"qzeros: not all are 7 or all 8, though sym .* is true; set it to false"):
        _loaded(tmp_path, _plan(tmp_path))


@pytest.mark.parametrize(
    ("changes", "g_idx"),
    [
        ({}, None), ({}, torch.zeros(WIDTH, dtype=torch.int32)), ({}, torch.arange(WIDTH, dtype=torch.int32) // GROUP),
        ({"desc_act": True}, torch.zeros(WIDTH, dtype=torch.int32)),
    ],
)  # fmt: skip
def test_groups_in_order_need_no_g_idx(changes: dict[str, Any], g_idx: torch.Tensor | None, tmp_path: Path) -> None:
    numbers = write(tmp_path, Format(_SYMMETRIC | changes, symmetric(7, g_idx=g_idx))).state_dict()
    plan, checkpoint = _plan(tmp_path), open_source(tmp_path).checkpoint
    assert checkpoint is not None
    check_checkpoint(plan, checkpoint)
    _same(_loaded(tmp_path, plan)["layers.1.down"], numbers["model.layers.1.mlp.down_proj.weight"])


@torch.no_grad()
def test_modules_that_are_left_alone(tmp_path: Path) -> None:
    """By GPTQ's rules for single modules, and by what lies in the file; other layers stay encoded."""
    made = FORMATS["gptq 4 bits"]
    model = write(tmp_path, made._replace(config=made.config | {"dynamic": {r"-:.*layers\.0\.mlp\.down_proj": {}}}))
    tensors = load_file(tmp_path / "model.safetensors")
    for plain in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"):
        tensors = {n: t for n, t in tensors.items() if not n.startswith(plain + ".")}
        tensors[f"{plain}.weight"] = model.state_dict()[f"{plain}.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = _loaded(tmp_path, _plan(tmp_path))
    _same(weights["layers.0.down"], model.state_dict()["model.layers.0.mlp.down_proj.weight"])
    _same(weights["layers.1.o"], model.state_dict()["model.layers.1.self_attn.o_proj.weight"])
    runner = driver.Driver(tmp_path, "eager")
    shown = {(row["name"], *row["layers"]): row for row in Artifact.open(runner.place).manifest.weights}
    assert (shown["layers.*.down", 0]["kept"], shown["layers.*.down", 0]["bits"]) == ("float32", 32)
    assert shown["layers.*.down", 1]["kept"] == f"nibble_zeros_f16-{GROUP}"
    assert shown["layers.*.down", 1]["stored"] == f"gptq_ordered_index-4-{GROUP}"
    assert shown["layers.*.down", 1]["bits"] == pytest.approx(4 * 128 / 96 + 32 / GROUP, abs=0.01)  # 96 become 128
    prompt = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, _ = runner.generate([prompt], 1)
    torch.testing.assert_close(logits[0], model(torch.tensor([prompt])).logits[0, -1], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gptq 4 bits", lambda t: t.pop("model.layers.1.mlp.up_proj.scales"), "layers.1.mlp.up_proj.scales: missing"),
        (
            "awq",
            lambda t: t.update({"model.layers.0.mlp.up_proj.scales": torch.zeros(3, 96, dtype=torch.float16)}),
            "model.layers.0.mlp.up_proj.scales: shape (3, 96), the model needs (2, 96)",
        ),
        (
            "fp8 blocks",
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(1)}),
            "model.layers.0.mlp.up_proj.weight_scale: not used by the model",
        ),
        (
            "int8 channels",
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int16)}),
            "model.layers.0.mlp.up_proj.weight: dtype I16 is not supported",
        ),
    ],
)
def test_broken_files_are_refused(name: str, change: Any, problem: str, tmp_path: Path) -> None:
    write(tmp_path, FORMATS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_source(tmp_path).checkpoint
    assert checkpoint is not None
    with pytest.raises(WeightError) as refused:
        check_checkpoint(_plan(tmp_path), checkpoint)
    assert any(problem in line for line in refused.value.problems), refused.value.problems


@pytest.mark.parametrize(
    ("name", "file", "fields"),
    [
        ("gptq 4 bits", "quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
        (
            "fp8 tensors", "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        ),
    ],
)  # fmt: skip
def test_what_the_quantizer_wrote_beside_config_json(
    name: str, file: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    numbers = write(tmp_path, FORMATS[name]).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(json.dumps(fields))
    _same(_loaded(tmp_path, _plan(tmp_path))["layers.1.down"], numbers["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("name", ["gptq 4 bits", "fp8 tensors"])
def test_biases_of_zeros_add_nothing(name: str, tmp_path: Path) -> None:
    """Older programs wrote one beside every matrix; another one, or one of a module that is not there, is refused."""
    write(tmp_path, FORMATS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    modules = {n.rpartition(".")[0] for n in tensors if n.endswith((".qweight", ".weight_scale"))}
    biases = {f"{module}.bias": torch.zeros(8).half() for module in modules}

    def check(more: dict[str, torch.Tensor]) -> None:
        save_file({**tensors, **more}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        checkpoint = open_source(tmp_path).checkpoint
        assert checkpoint is not None
        check_checkpoint(_plan(tmp_path), checkpoint)

    check(biases)
    for changed in (f"{min(modules)}.bias", "model.layers.7.mlp.up_proj.bias"):
        with pytest.raises(WeightError, match=f"{changed}: not used by the model"):
            check(biases | {changed: torch.full((8,), float("7" not in changed)).half()})


_UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("nf4", lambda t: t.update({f"{_UP}.absmax": torch.ones(95)}), "of 6144 entries there would be 96"),
        (
            "nf4 nested",
            lambda t: t.update({f"{_UP}.nested_absmax": torch.ones(2)}),
            "nested_blocksize is 256, of 96 entries there would be 1 scales, not 2",
        ),
        (
            "fp4",
            lambda t: t.update({f"{_UP}.quant_state.bitsandbytes__fp4": _bytes(blocksize=64, shape=[64, 96])}),
            "shape is [64, 96], the model needs [96, 64]",
        ),
        (
            "llm.int8",
            lambda t: t.update({f"{_UP[:-7]}.weight_format": torch.tensor(2, dtype=torch.uint8)}),
            "weight_format is 2: only rows (0) can be read",
        ),
    ],
)  # fmt: skip
def test_numbers_that_contradict_each_other_are_refused(name: str, change: Any, problem: str, tmp_path: Path) -> None:
    write(tmp_path, FORMATS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        _loaded(tmp_path, _plan(tmp_path))
    assert _UP in str(refused.value)
    assert problem in str(refused.value)


def _bytes(**fields: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "new"}, ("quant_method is 'new'", "gptq, awq")),
        ({"bits": 4}, ("quant_method is None",)),
        ({"quant_method": "gptq", "bits": 5}, ("bits is 5", "2, 3, 4, 8")),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ("group_size is 0",)),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ("version is 'gemv'", "gemm")),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("weight_block_size is [128]",)),
        ({"quant_method": "bitsandbytes"}, ("load_in_4bit is None",)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, ("'int4'", "nf4, fp4")),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            ("bnb_4bit_quant_storage is 'bfloat16'", "uint8"),
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "UIntXConfig", "_data": {}}}},
            ("'UIntXConfig'",),
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "Int4WeightOnlyConfig",
                        "_data": {"int4_packing_format": {"_type": "F", "_data": "TILE_PACKED_TO_4D"}},
                    }
                },
            },
            ("int4_packing_format is 'TILE_PACKED_TO_4D'", "save the model again with plain"),
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, ("quant_algo is 'W4A8'",)),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            ("sparsity_config.format is 'sparse-24-bitmask'", "save_compressed=False"),
        ),
    ],
)
def test_settings_that_cannot_be_read(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        scheme_of({"quantization_config": config})
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_the_option_names_the_checkpoints_method_or_rounds_again(tmp_path: Path) -> None:
    write(tmp_path, FORMATS["awq"])
    config = open_source(tmp_path).config

    def wanted(said: str) -> str | None:
        return compile_config(config, EngineArgs(target="cpu", quantization=said)).quantization

    assert (wanted("awq"), wanted("awq_marlin"), wanted("int4")) == (None, None, "int4")
    with pytest.raises(ConfigError, match="quantization is 'gptq': this checkpoint is of awq"):
        wanted("gptq")
