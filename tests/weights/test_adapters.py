"""Tables of adapters beside PEFT's own sums, on tiny random models: separate, fused and transposed projections."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from graphllm.compile.families import find_model
from graphllm.config import ConfigError
from graphllm.ir.registry import load_ops
from graphllm.weights.adapters.adapted import AdaptedLinear, AdapterPart, adapted_linear
from graphllm.weights.adapters.adapters import adapter_bytes, adapter_digest, check_adapter, read_adapter
from graphllm.weights.plan.plan import make_plan

_SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
NAMES = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
}
RANK = 8


@functools.cache
def _linears(family: str) -> list[AdaptedLinear]:
    load_ops()
    config = CONFIGS[family]()
    fields = config.to_dict() | {"architectures": [type(_new(config)).__name__]}
    model = find_model(fields)
    plan = make_plan(model, model.config(fields), "float32")
    layers = [e.name for e in plan if e.name.startswith("layers.") and len(e.shape) == 2]
    return [found for name in layers if (found := adapted_linear(plan, name)) is not None]


# Patterns that fit no module
pytestmark = pytest.mark.filterwarnings("ignore:.*pattern keys did not match:RuntimeWarning")


def _new(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def _wrapped(family: str, seed: int = 0, **fields: Any) -> Any:
    """PEFT's model, whose A and B are all random."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": list(NAMES[family]), "fan_in_fan_out": family == "gpt2"}
    model = peft.get_peft_model(_new(CONFIGS[family]()), peft.LoraConfig(**chosen | fields))
    g = torch.Generator().manual_seed(seed)
    for name, values in model.named_parameters():
        if "lora_" in name:
            values.data = torch.randn(values.shape, generator=g) / 4
    return model


def _check(model: Any, linears: list[AdaptedLinear], folder: Path) -> int:
    """What tables say of every linear layer is PEFT's delta of its modules, one behind the other. Returns how many
    linear layers are changed."""
    model.save_pretrained(folder)
    tables = read_adapter(folder, linears, RANK, "float32")
    assert sum(t.nbytes for t in tables.values()) == adapter_bytes(folder, linears, RANK, "float32")
    base = model.base_model.model
    for linear in linears:
        if f"{linear.name}.lora_a" not in tables:
            assert f"{linear.name}.lora_b" not in tables
        x = torch.randn(5, linear.inputs)
        start = 0
        for n, (width, part) in enumerate(zip(linear.widths, linear.parts, strict=True)):
            # Of the names that checkpoints use, the one that transformers uses; some leave out the first word.
            (module,) = {m for name in part.modules for m in _modules(base, name)}
            expected = torch.zeros(5, width)
            if hasattr(module, "lora_A"):
                delta = module.get_delta_weight("default")  # in the layout of the module's own weight
                delta = delta.T if getattr(module, "fan_in_fan_out", False) else delta
                delta = delta[part.start : part.stop] if part.stop else delta
                expected = x @ delta.T
            found = torch.zeros(5, width)
            if f"{linear.name}.lora_a" in tables:
                a = tables[f"{linear.name}.lora_a"][n * RANK : (n + 1) * RANK]
                found = (x @ a.T) @ tables[f"{linear.name}.lora_b"][:, start : start + width]
            largest = float(expected.abs().max().clamp(min=1.0))  # a scale may be large
            torch.testing.assert_close(found, expected.detach(), atol=1e-5 * largest, rtol=1e-5)
            start += width
    return len(tables) // 2


def _modules(base: Any, name: str) -> set[Any]:
    try:
        return {base.get_submodule(name)}
    except AttributeError:
        return set()


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def linears(family: str) -> list[AdaptedLinear]:
    return _linears(family)


CHANGED = {"llama": 8, "phi3": 8, "gpt2": 8}  # qkv, output, gate and up or up, down: of two layers
REGEX = {"llama": r".*\.1\..*(q|v)_proj", "phi3": r".*\.1\..*qkv_proj", "gpt2": r".*\.1\..*c_attn"}


@pytest.mark.parametrize("rslora", [False, True])
def test_all_projections(family: str, linears: list[AdaptedLinear], tmp_path: Path, rslora: bool) -> None:
    assert _check(_wrapped(family, use_rslora=rslora, lora_alpha=5), linears, tmp_path) == CHANGED[family]


def test_ways_to_choose_modules(family: str, linears: list[AdaptedLinear], tmp_path: Path) -> None:
    assert _check(_wrapped(family, target_modules="all-linear"), linears, tmp_path / "all") == CHANGED[family]
    assert _check(_wrapped(family, target_modules=REGEX[family]), linears, tmp_path / "regex") == 1
    pattern = "h" if family == "gpt2" else "layers"
    first = {"layers_to_transform": [0], "layers_pattern": pattern}
    assert _check(_wrapped(family, **first), linears, tmp_path / "first") == CHANGED[family] // 2
    without = {"exclude_modules": r".*\.0\..*"}
    assert _check(_wrapped(family, **without), linears, tmp_path / "without") == CHANGED[family] // 2


_ranks = st.integers(1, RANK)


@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_patterns(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks and alphas by name, by end, and by regular expression; the first pattern that fits counts."""
    family = data.draw(st.sampled_from(tuple(CONFIGS)))
    names = NAMES[family]
    keys = st.sampled_from([*names, *(rf"{n.rpartition('.')[2]}" for n in names), r".*\.0\..*", r"\w+_proj", r"c_.*"])
    fields = {
        "target_modules": data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)),
        "r": data.draw(_ranks),
        "lora_alpha": data.draw(st.integers(1, 40)),
        "use_rslora": data.draw(st.booleans()),
        # Sorted, for so PEFT writes them: of two that fit, another one would count when it reads them.
        "rank_pattern": dict(sorted(data.draw(st.dictionaries(keys, _ranks, max_size=3)).items())),
        "alpha_pattern": dict(
            sorted(data.draw(st.dictionaries(keys, st.floats(0.5, 40, width=16), max_size=3)).items())
        ),
    }
    model = _wrapped(family, data.draw(st.integers(0, 9)), **fields)
    _check(model, _linears(family), tmp_path_factory.mktemp("adapter"))


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    _wrapped("llama", lora_alpha=5).save_pretrained(tmp_path)
    linears = _linears("llama")
    exact, rounded = (read_adapter(tmp_path, linears, RANK, dtype) for dtype in ("float32", "bfloat16"))
    for name, values in exact.items():
        assert torch.equal(values.bfloat16(), rounded[name])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    _wrapped("llama").save_pretrained(folder)
    return folder


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
BROKEN: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors] | None, str]] = {
    "ia3": ({"peft_type": "IA3"}, None, r"peft_type is 'IA3'; only LORA"),
    "dora": ({"use_dora": True}, None, r"use_dora is True.*graphllm merge"),
    "bias": ({"bias": "lora_only"}, None, r"bias is 'lora_only'.*graphllm merge"),
    "saved": ({"modules_to_save": ["lm_head"]}, None, r"modules_to_save is \['lm_head'\].*graphllm merge"),
    "lora bias": ({"lora_bias": True}, None, r"lora_bias is True.*graphllm merge"),
    "pissa": ({"init_lora_weights": "pissa"}, None, r"init_lora_weights is 'pissa'.*path_initial_model"),
    "alora": ({"alora_invocation_tokens": [1]}, None, r"alora_invocation_tokens is \[1\].*merge_and_unload"),
    "experts": ({"target_parameters": ["experts.w"]}, None, r"target_parameters has 'w'.*merge_and_unload"),
    "rank": ({"r": 3}, None, r"r of model\.layers\.\d.* is 3, its tensors have 4"),
    "no rank": ({"r": "4"}, None, r"adapter_config\.json: r is '4'"),
    "alpha": ({"lora_alpha": None}, None, r"adapter_config\.json: lora_alpha is None"),
    "pattern": ({"rank_pattern": {"q_proj(": 4}}, None, r"rank_pattern: .* is no regular expression"),
    "patterns": ({"alpha_pattern": [4]}, None, r"alpha_pattern is \[4\]"),
    "inputs": ({}, lambda t: t | {f"{FIRST}.lora_A.weight": torch.zeros(4, 33)}, r"q_proj has 33 inputs and 32 out"),
    "outputs": ({}, lambda t: t | {f"{FIRST}.lora_B.weight": torch.zeros(31, 4)}, r"31 outputs, the model's has 32"),
    "half": ({}, lambda t: {n: v for n, v in t.items() if n != f"{FIRST}.lora_B.weight"}, r"q_proj has no lora_B"),
    "one dimension": ({}, lambda t: t | {f"{FIRST}.lora_A.weight": torch.zeros(4)}, r"lora_A \[4\].*are matrices"),
    "integers": ({}, lambda t: {n: v.to(torch.int8) for n, v in t.items()}, r"is I8; adapters are in float32"),
    "strange": ({}, lambda t: {n.replace("q_proj", "x"): v for n, v in t.items()}, r"\.x is none of the layers"),
    "twice": ({}, lambda t: t | {f"{FIRST}.lora_A.default.weight": torch.zeros(4, 32)}, r"is there twice"),
    "nan": ({}, lambda t: t | {f"{FIRST}.lora_A.weight": torch.full((4, 32), torch.nan)}, r"q_proj\.lora_A.*not fini"),
    "magnitude": ({}, lambda t: t | {f"{FIRST}.lora_magnitude_vector": torch.ones(32)}, r"q_proj has lora_magnitude_v"),
    "embedding": ({}, lambda t: t | {"model.embed_tokens.lora_embedding_A": torch.zeros(4, 67),
                                     "model.embed_tokens.lora_embedding_B": torch.zeros(32, 4)},
                  r"embed_tokens is none of the layers.*graphllm merge"),
    "whole": ({}, lambda t: t | {"base_model.model.lm_head.weight": torch.zeros(1)}, r"lm_head\.weight is no lora_A"),
    "nothing": ({}, lambda t: {}, r"there is no tensor in it"),
}  # fmt: skip


def _copy(saved: Path, folder: Path, fields: dict[str, Any], change: Callable[[Tensors], Tensors] | None) -> Path:
    folder.mkdir(exist_ok=True)
    config = json.loads((saved / "adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(saved / "adapter_model.safetensors")
    save_file(change(tensors) if change else tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("case", BROKEN)
def test_mistakes_are_named(saved: Path, tmp_path: Path, case: str) -> None:
    fields, change, told = BROKEN[case]
    linears = _linears("llama")
    folder = _copy(saved, tmp_path, fields, change)
    with pytest.raises(ConfigError, match=told) as raised:
        read_adapter(folder, linears, RANK, "float32")
    assert str(folder) in str(raised.value)
    with pytest.raises(ConfigError, match=told):
        check_adapter(folder, linears, RANK)


def test_what_does_not_fit_the_engine(saved: Path, tmp_path: Path) -> None:
    linears = _linears("llama")
    with pytest.raises(ConfigError, match=r"has rank 4, the engine's tables hold 2; start with --max-lora-rank 4"):
        read_adapter(saved, linears, 2, "float32")
    large = _copy(saved, tmp_path, {"lora_alpha": 1e7}, None)
    with pytest.raises(ConfigError, match=r"beyond float16, in which the engine computes"):
        read_adapter(large, linears, RANK, "float16")
    part = AdaptedLinear("layers.0.q", 32, (16,), (AdapterPart(("model.layers.0.self_attn.q_proj",), 0, 16),))
    with pytest.raises(ConfigError, match=r"32 outputs, the model's has 32 inputs and 16 outputs"):
        read_adapter(_copy(saved, tmp_path, {}, lambda t: {n: v for n, v in t.items() if n.startswith(FIRST)}),
                     [part], RANK, "float32")  # fmt: skip


def test_files_that_are_missing_or_cut(saved: Path, tmp_path: Path) -> None:
    linears = _linears("llama")

    def refused(told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            read_adapter(tmp_path, linears, RANK, "float32")

    refused("adapter_config.json is not there; give the folder of a LoRA adapter")
    (tmp_path / "adapter_config.json").write_text("{")
    refused("adapter_config.json: damaged")
    _copy(saved, tmp_path, {}, None)
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        (tmp_path / "adapter_model.safetensors").write_bytes(whole[:cut])
        refused("adapter_model.safetensors: ")
    # A header that asks for more than there is: nothing is allocated for it.
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + whole[8:])
    refused("no header")
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    refused("adapter_model.bin, which can run code when it is read; save it again with safe_serialization=True")


def test_digest_is_of_what_the_files_hold(saved: Path, tmp_path: Path) -> None:
    same = _copy(saved, tmp_path / "same", {}, None)
    again = _copy(same, tmp_path / "again", {}, None)
    assert adapter_digest(same) == adapter_digest(again)
    other = _copy(same, tmp_path / "other", {"lora_alpha": 9}, None)
    changed = _copy(same, tmp_path / "changed", {}, lambda t: t | {f"{FIRST}.lora_A.weight": torch.zeros(4, 32)})
    assert len({adapter_digest(f) for f in (same, other, changed)}) == 3
    with pytest.raises(ConfigError, match=r"adapter_config\.json is not there"):
        adapter_digest(tmp_path)
