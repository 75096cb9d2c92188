"""Merged checkpoints give the logits of PEFT's own merge, in transformers and here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphllm.config import ConfigError
from graphllm.quantize import output as output_files
from graphllm.quantize.merge import merge
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from tests.waiting import PATIENCE

_SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
BASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "tied": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
IDS = torch.arange(3, 35).view(2, 16)


def _base(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(BASES[name]())
    with torch.no_grad():  # biases begin as zeros, which hide mistakes
        for n, values in model.named_parameters():
            if n.endswith("bias"):
                torch.nn.init.normal_(values, std=0.1)
    model.to(dtype).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def _adapter(base: Path, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """An adapter whose every number is random, as PEFT saves it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | fields))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in wrapped.named_parameters():
            if values.requires_grad:
                noise = torch.randn(values.shape, generator=g)
                # Lengths of DoRA stay near what they are.
                values.copy_(values * (1 + noise / 8) if "magnitude" in name else values / 2 + noise / 4)
    wrapped.save_pretrained(folder)
    return folder


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def _by_peft(base: Path, adapter: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return _logits(peft.PeftModel.from_pretrained(model, adapter).merge_and_unload())


def _merge(base: Path, out: Path, *adapters: Path | tuple[Path, float], dtype: str | None = None) -> torch.Tensor:
    weighted = [a if isinstance(a, tuple) else (a, 1.0) for a in adapters]
    merge(base, Checkpoint.open(base), weighted, out, dtype)
    return _logits(transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))


QV = ["q_proj", "v_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("llama", {"target_modules": "all-linear"}),
    "over a tie": ("tied", {"target_modules": "all-linear"}),
    "patterns": ("llama", {"target_modules": QV, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {r".*1\..*": 3},
                           "use_rslora": True}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "dora": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "dora, transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
    "all biases": ("qwen2", {"target_modules": QV, "bias": "all"}),
    "biases of its modules": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "bias of B": ("qwen2", {"target_modules": QV, "lora_bias": True}),
    "whole modules": ("llama", {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": ("llama", {"target_modules": ["lm_head", "down_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(tmp_path: Path, case: str) -> None:
    name, fields = CASES[case]
    base = _base(tmp_path / "base", name)
    adapter = _adapter(base, tmp_path / "adapter", **fields)
    expected = _by_peft(base, adapter)
    plain = _logits(transformers.AutoModelForCausalLM.from_pretrained(base))
    assert (expected - plain).abs().max() > 0.05  # the adapter does something
    torch.testing.assert_close(_merge(base, tmp_path / "out", adapter), expected, atol=2e-5, rtol=1e-4)


def test_a_sum_of_adapters(tmp_path: Path) -> None:
    base = _base(tmp_path / "base", "llama")
    one = _adapter(base, tmp_path / "one", 1, target_modules="all-linear")
    two = _adapter(base, tmp_path / "two", 2, target_modules=QV, r=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    wrapped = peft.PeftModel.from_pretrained(model, one, "one")
    wrapped.load_adapter(two, "two")
    with torch.no_grad():  # PEFT's own sums have one rank or a decomposition, so each is scaled and merged
        for module in wrapped.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                for n, weight in (("one", 0.5), ("two", -2.0)):
                    if n in module.scaling:
                        module.scaling[n] *= weight
    expected = _logits(wrapped.merge_and_unload(adapter_names=["one", "two"]))
    found = _merge(base, tmp_path / "out", (one, 0.5), (two, -2.0))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_rounded_once(tmp_path: Path, dtype: str | None) -> None:
    """Every number is the nearest one of the new dtype to the exact sum; what the adapter leaves alone is as it was."""
    base = _base(tmp_path / "base", "llama", torch.bfloat16)
    adapter = _adapter(base, tmp_path / "adapter", target_modules=["down_proj"])
    _merge(base, tmp_path / "out", adapter, dtype=dtype)
    kind = getattr(torch, dtype or "bfloat16")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changes = load_file(adapter / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, values in after.items():
        assert values.dtype == kind
        exact = before[name].double()
        if "down_proj" in name:
            a, b = (changes[f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight"].double() for x in "AB")
            exact = exact + 6 / 4 * b @ a
            torch.testing.assert_close(values, exact.to(kind), atol=1e-6, rtol=torch.finfo(kind).eps)
            if kind != torch.float32:  # what is computed in float32 is a little off; a few numbers lie between two
                assert (values != exact.to(kind)).double().mean() < 0.002
        else:
            assert torch.equal(values, exact.to(kind))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == (dtype or "bfloat16")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_files_of_a_sharded_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = _base(tmp_path / "base", "llama")
    adapter = _adapter(base, tmp_path / "adapter", target_modules="all-linear")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    monkeypatch.setattr(output_files, "_FILE_BYTES", 30_000)
    found = _merge(tmp_path / "sharded", tmp_path / "out", adapter)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(found, _by_peft(base, adapter), atol=2e-5, rtol=1e-4)


def test_a_checkpoint_that_names_no_model(tmp_path: Path) -> None:
    """As the first GPT-2 files: "h.0..." for what is "transformer.h.0..." in the model with a head."""
    base = _base(tmp_path / "base", "gpt2")
    adapter = _adapter(base, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    expected = _by_peft(base, adapter)
    tensors = load_file(base / "model.safetensors")
    short = {n.removeprefix("transformer."): t for n, t in tensors.items()}
    assert short.keys() != tensors.keys()
    save_file(short, base / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(_merge(base, tmp_path / "out", adapter), expected, atol=2e-5, rtol=1e-4)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == short.keys()


def test_adapted_heads_may_be_weighted(tmp_path: Path) -> None:
    """PEFT saves the base's head beside them."""
    base = _base(tmp_path / "base", "llama")
    adapter = _adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    plain = _logits(transformers.AutoModelForCausalLM.from_pretrained(base))
    half = _merge(base, tmp_path / "half", (adapter, 0.5))
    torch.testing.assert_close(half, (plain + _by_peft(base, adapter)) / 2, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A base of 400 MB in two files takes less than half as much."""
    base, adapter, count = tmp_path / "base", tmp_path / "adapter", 24
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 8}))
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(count)]
    files = {f"{n}.weight": f"{i % 2}.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        save_file({n: torch.zeros(2048, 2048) for n, f in files.items() if f == file}, base / file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({f"{n}.lora_{x}.weight": torch.ones((8, 2048) if x == "A" else (2048, 8)) for n in names for x in "AB"},
              adapter / "adapter_model.safetensors")  # fmt: skip
    script = (
        "import resource, sys, torch\nfrom pathlib import Path\nfrom graphllm.quantize.merge import merge\n"
        "from graphllm.weights.checkpoint.checkpoint import Checkpoint\nbase, adapter, out = map(Path, sys.argv[1:])\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nbefore = most()\n"
        "merge(base, Checkpoint.open(base), [(adapter, 1.0)], out)\nprint(1024 * (most() - before))"
    )
    command = [sys.executable, "-c", script, base, adapter, tmp_path / "out"]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout)
    assert grown < 180e6 < sum(f.stat().st_size for f in base.glob("*.safetensors")) / 2
    made = load_file(min((tmp_path / "out").glob("*.safetensors")))
    assert all(torch.equal(t, torch.full((2048, 2048), 8.0)) for t in made.values())


def test_command(tmp_path: Path, cli: Any) -> None:
    """What it writes runs here, and says what PEFT's merged model says."""
    from graphllm import LLM, SamplingParams

    base = _base(tmp_path / "base", "llama")
    adapter = _adapter(base, tmp_path / "adapter", target_modules="all-linear")
    done = cli("merge", base, f"{adapter}:1.0", "-o", tmp_path / "out")
    assert done.code == 0
    assert "1 adapter merged, 14 tensors changed" in done.out
    with LLM(tmp_path / "out", dtype="float32", backend="eager", max_model_len=64, max_num_seqs=1,
             max_num_batched_tokens=32, skip_tokenizer_init=True) as llm:  # fmt: skip
        (output,) = llm.generate([{"prompt_token_ids": IDS[0].tolist()}], SamplingParams(max_tokens=1, logprobs=5))
    expected = torch.log_softmax(_by_peft(base, adapter)[0, -1], -1)
    for token, told in output.outputs[0].logprobs[0].items():
        assert abs(told.logprob - float(expected[token])) < 1e-4
    done = cli("merge", base, f"{adapter}:much", "-o", tmp_path / "other")
    assert done.code == 2
    assert "'much': give a number" in done.err


def _refused(told: str, base: Path, out: Path, *adapters: tuple[Path, float], dtype: str | None = None) -> None:
    with pytest.raises(ConfigError, match=told):
        merge(base, Checkpoint.open(base), list(adapters), out, dtype)
    assert not list(out.parent.glob(f"*{out.name}*"))


def test_mistakes(tmp_path: Path) -> None:
    """Each is named with its remedy, and nothing is left behind."""
    base, tied, out = _base(tmp_path / "base", "llama"), _base(tmp_path / "tied", "tied"), tmp_path / "new"
    adapter = _adapter(base, tmp_path / "adapter", target_modules=QV)
    _refused(r"the base has no model\.layers\.0\.self_attn\.x\.weight; .*q_proj", base, out,
             (_renamed(adapter, tmp_path / "x", "q_proj", "x"), 1.0))  # fmt: skip
    _refused(r"k_proj is for a matrix of \[32, 32\], the base's is \[16, 32\]", base, out,
             (_renamed(adapter, tmp_path / "k", "q_proj", "k_proj"), 1.0))  # fmt: skip
    for module in ("lm_head", "embed_tokens"):
        on_tie = _adapter(base, tmp_path / module, target_modules=[module])
        _refused(rf"{module}\.weight is tied .* tie_word_embeddings false", tied, out, (on_tie, 1.0))
    saved = _adapter(base, tmp_path / "saved", target_modules=QV, modules_to_save=["lm_head"])
    _refused(r"lm_head\.weight is no sum .* merge this adapter by itself", base, out, (saved, 0.5))
    dora = _adapter(base, tmp_path / "dora", target_modules=QV, use_dora=True)
    _refused(r"q_proj\.weight is no sum .* merge this adapter by itself", base, out, (dora, 1.0), (adapter, 1.0))
    qwen2 = _base(tmp_path / "qwen2", "qwen2")
    bias = _adapter(qwen2, tmp_path / "bias", target_modules=["q_proj"], lora_bias=True)
    _refused(r"q_proj has a bias, and the base has none there", base, out, (bias, 1.0))
    _refused(r"would have numbers beyond float16; give --dtype bfloat16", base, out, (adapter, 1e9), dtype="float16")
    _refused(r"dtype is 'int8': give one of", base, out, (adapter, 1.0), dtype="int8")
    _refused(r"adapter_config\.json is not there", base, out, (base, 1.0))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    _refused(r"is quantized \(awq\); merge into the checkpoint that it was made from, .*graphllm quantize", base, out,
             (adapter, 1.0))  # fmt: skip
    (base / "config.json").write_text(json.dumps(config))
    out.mkdir()
    (out / "file").touch()
    with pytest.raises(ConfigError, match="is there already; give a new folder"):
        merge(base, Checkpoint.open(base), [(adapter, 1.0)], out)
    assert [f.name for f in out.iterdir()] == ["file"]


def _renamed(adapter: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of its modules of one name only, under another one."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({n.replace(old, new): t for n, t in tensors.items() if old in n}, folder / "adapter_model.safetensors")
    return folder
