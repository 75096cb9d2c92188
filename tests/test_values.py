"""Strange values in a checkpoint's files and in every option: one line that names the mistake, or the right answer.

What is right is what transformers computes from the same config.json, what the safetensors library reads from the same
file, and the text of the undamaged checkpoint where nothing that matters has changed. The fast share runs in the suite,
the rest under ``-m slow``.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from graphllm.config import ConfigError, EngineArgs, EngineConfig, definitions
from graphllm.config.parameter import parameters
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.loading.checkpoint.source import Source, open_source
from tests.models import driver
from tests.tiers import draws

REMOVED = object()
STRANGE: list[Any] = [
    "x", "2", "", 2.0, 2.5, 0.5, True, False, None, [], [1], {}, {"a": 1}, -1, 0, 1, 2, 3, 4, 8, 16, 33, 10**6, 10**9,
    10**30, float("inf"), -0.0, 1e-300, 1e300, ["full_attention", "sliding_attention"], REMOVED,
]  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA | WINDOW),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", LLAMA | WINDOW | {"head_dim": 8}),
    "gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA | WINDOW | {"head_dim": 8, "sliding_window_pattern": 2},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", LLAMA | WINDOW),
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.35,
         "bos_token_id": None, "eos_token_id": None},
    ),
    "opt": (
        "OPTConfig", "OPTForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "init_std": 0.35, "bos_token_id": None, "eos_token_id": None,
         "pad_token_id": None},
    ),
}  # fmt: skip
# What files may say although these ones do not.
FURTHER = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "head_dim", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "text_config", "quantization_config", "dtype", "torch_dtype", "n_inner",
    "num_key_value_heads",
    "scale_attn_weights", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "hidden_act",
    "hidden_activation", "rope_local_base_freq", "sliding_window_pattern", "activation_function", "is_causal",
    "use_bidirectional_attention", "add_cross_attention", "scale_attn_by_inverse_layer_idx", "enable_bias",
    "word_embed_proj_dim", "do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine",
    "architectures",
)  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip
OPTIONAL_ROPE = (
    "rope_theta", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "type",
    "partial_rotary_factor",
)  # fmt: skip
TOKENS = [1, 5, 9, 20, 33, 47, 2, 8, 61, 7, 30, 11]  # more than a window


def _fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def _slow(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [draws(few // 3, few), pytest.param(many, marks=pytest.mark.slow)])


def _with(fields: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy with another value in one field."""
    changed = copy.deepcopy({**fields, name: value})
    if value is REMOVED:
        del changed[name]
    return changed


# --- config.json


@dataclass
class Family:
    """A tiny checkpoint of an architecture. logits: ours, by what config.json was read as."""

    source: Source
    model: Any
    weights: Mapping[str, torch.Tensor]
    place: Path
    logits: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.source.config)

    def read(self, hf: Mapping[str, Any]) -> Any:
        """What the family makes of a config.json, checked as before a compilation."""
        from graphllm.compile.families import find_model
        from graphllm.loading.artifact.resolve import compile_config
        from graphllm.weights.plan.match import check_checkpoint
        from graphllm.weights.plan.plan import make_plan

        args = EngineArgs(target="cpu", backend="eager", max_num_seqs=2, max_num_batched_tokens=16)
        config, model = compile_config(hf, args), find_model(hf)
        c = model.config(hf)
        assert self.source.checkpoint is not None
        check_checkpoint(make_plan(model, c, config.dtype), self.source.checkpoint)
        return c

    def ours(self, hf: Mapping[str, Any], c: Any) -> torch.Tensor:
        """Logits behind the last token."""
        if c not in self.logits:
            folder = self.place / "changed"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(hf))
            (folder / "model.safetensors").symlink_to(self.source.folder / "model.safetensors")
            (self.logits[c],), _ = driver.Driver(folder, "eager").generate([TOKENS], 1)
        return self.logits[c]

    def theirs(self, hf: Mapping[str, Any]) -> torch.Tensor | None:
        """Logits of transformers; None when it takes no such config. A whole number is good where it wants any."""
        for read in (lambda v: v, lambda v: float(v) if type(v) is int else v):
            floats = ("rms_norm_eps", "layer_norm_epsilon", "final_logit_softcapping", "attn_logit_softcapping")
            fields = {name: read(value) if name in floats else value for name, value in hf.items()}
            try:
                config = self.model.config_class.from_dict(copy.deepcopy(fields))
                config._attn_implementation = "eager"
                model = self.model(config).eval().float()
                found = model.load_state_dict(self.weights, strict=False)
                tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
                if ({*found.missing_keys, *found.unexpected_keys}) - tied:
                    continue
                with torch.no_grad():
                    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0, -1]
                return logits
            except Exception:  # it checks little, so all sorts
                continue
        return None


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    found = {}
    transformers.logging.set_verbosity_error()
    for name, (config, model, fields) in FAMILIES.items():
        torch.manual_seed(0)
        cls = getattr(transformers, model)
        folder = tmp_path_factory.mktemp(name)
        made = cls(getattr(transformers, config)(**fields)).eval()
        made.save_pretrained(folder)
        found[name] = Family(open_source(folder), cls, made.state_dict(), folder / "out")
    return found


@st.composite
def changed_configs(draw: st.DrawFn, configs: Mapping[str, dict[str, Any]]) -> tuple[str, dict[str, Any], str]:
    """A family, its config.json with a strange value, and the field that has it."""
    family = draw(st.sampled_from(sorted(configs)))
    value = draw(st.sampled_from(STRANGE) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5))
    if draw(st.booleans()):
        rope = draw(st.sampled_from(ROPES))
        where = draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
        name = draw(st.sampled_from([*rope, *OPTIONAL_ROPE]))
        return family, _with(configs[family], where, _with(rope, name, value)), name
    name = draw(st.sampled_from(sorted({*configs[family], *FURTHER})))
    return family, _with(configs[family], name, value), name


@_slow(300, 6000)
def test_config_json(families: dict[str, Family], examples: int) -> None:
    """What is accepted is what transformers computes; the logits are compared in the slow share."""
    counts = {"refused": 0, "neutral": 0, "compared": 0}

    @_fuzz(examples)
    @given(changed_configs({name: family.config for name, family in families.items()}))
    def fuzz(case: tuple[str, dict[str, Any], str]) -> None:
        family, hf, name = families[case[0]], *case[1:]
        try:
            c = family.read(hf)
        except ConfigError:
            counts["refused"] += 1
            return
        same = c == family.read(family.config)
        counts["neutral" if same else "compared"] += 1
        if examples < 1000 or c.max_len < len(TOKENS):
            return
        theirs = family.theirs(hf)
        if theirs is None and (same or name in ("max_position_embeddings", "n_positions")):
            theirs = family.theirs(family.config)  # nothing has changed, or fewer positions, which are the same
        assert theirs is not None, f"{name}: transformers refuses it"
        torch.testing.assert_close(family.ours(hf, c), theirs, rtol=2e-4, atol=2e-4)

    fuzz()
    assert counts["refused"] > examples / 8
    assert counts["compared"] > examples / 50


# --- files


def _run(cli: Any, folder: Path, artifact: Path, *more: object) -> Any:
    fixed = ("--artifact", artifact, "--temperature", 0, "--max-tokens", 4, "--quiet", "--prompt", "hello world")
    return cli("run", "--model", folder, *fixed, *more)


def _told(done: Any) -> None:
    """One line that says what is wrong, nothing else: 2, or 1 where the prompt alone shows it, as a template's does."""
    assert (done.code, done.out) == (1 if done.err.startswith("graphllm: prompt-0: ") else 2, ""), done
    first, *rest = done.err.rstrip("\n").split("\n")
    assert first.startswith("graphllm: "), done.err
    assert all(line.startswith("  ") for line in rest), done.err  # several problems of tensors have a line each


def _linked(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint whose files may be replaced one by one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def _replace(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content)


JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "model.safetensors.index.json",
)  # fmt: skip
UNREADABLE = {
    "empty": b"",
    "not-utf-8": b'{"a": "\xff\xfe"}',
    "bom": b"\xef\xbb\xbf{}",
    "utf-16": "{}".encode("utf-16"),
    "list": b"[]",
    "truncated": b'{"a": ',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested": b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
    "digits": b'{"a": ' + b"9" * 10_000_000 + b"}",
    "nan": b'{"a": NaN}',
    "folder": None,
    "loop": None,
}


@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.jinja", "model.safetensors"])
def test_unreadable_files(name: str, cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> None:
    for kind, content in UNREADABLE.items():
        folder = _linked(checkpoint, tmp_path / "model")
        if name == "model.safetensors.index.json":
            (folder / "model.safetensors").unlink()
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
        elif kind == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(folder / name)
        if name == "chat_template.jinja" and kind not in ("not-utf-8", "utf-16"):
            continue  # any text is a template, and without one the tokenizer's is taken
        if (name, kind) == ("tokenizer.json", "nan"):
            continue
        done = _run(cli, folder, eager_artifact)
        _told(done)
        assert name in done.err, (kind, done.err)


FILE_FIELDS: dict[str, tuple[str, ...]] = {
    "generation_config.json": (
        "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "eos_token_id",
        "bos_token_id", "pad_token_id", "further",
    ),
    "tokenizer_config.json": (
        "bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "added_tokens_decoder", "add_bos_token",
        "model_max_length", "tokenizer_class", "further",
    ),
    "special_tokens_map.json": ("bos_token", "eos_token", "pad_token", "mask_token", "further"),
    "config.json": ("eos_token_id", "bos_token_id", "pad_token_id"),
}  # fmt: skip
HARMLESS = ("temperature", "top_k", "top_p", "min_p", "do_sample", "further", "pad_token_id", "pad_token")  # greedy


@_slow(30, 700)
def test_fields_of_other_files(cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path, examples: int) -> None:
    """Refused, or the answer is the same where the field cannot change it."""
    usual = _run(cli, checkpoint, eager_artifact).out
    assert usual

    @_fuzz(examples)
    @given(
        st.sampled_from([(file, name) for file, names in FILE_FIELDS.items() for name in names]),
        st.sampled_from(STRANGE) | st.text(max_size=4) | st.lists(st.sampled_from(STRANGE[:-1]), max_size=3),
    )
    def fuzz(place: tuple[str, str], value: Any) -> None:
        file, name = place
        folder = _linked(checkpoint, tmp_path / "model")
        fields = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        _replace(folder / file, json.dumps(_with(fields, name, value)).encode())
        done = _run(cli, folder, eager_artifact)
        if done.code:
            _told(done)
        elif name in HARMLESS:
            assert done.out == usual

    fuzz()


@_slow(25, 700)
def test_damaged_bytes(cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path, examples: int) -> None:
    """Bytes cut off or changed anywhere: refused, or the tensors are those that the safetensors library reads."""
    shapes = {name: (info.dtype, info.shape) for name, info in open_source(checkpoint).checkpoint.tensors.items()}  # type: ignore[union-attr]
    names = [f.name for f in checkpoint.iterdir()]

    @_fuzz(examples)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(names)))
        content = bytearray((checkpoint / name).read_bytes())
        near = min(len(content), 3000)  # the header of tensors
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, near - 1))] = data.draw(
                    st.sampled_from(b'\x00"{}[],:0159-eaXn\xff\n ')
                )
        folder = _linked(checkpoint, tmp_path / "model")
        _replace(folder / name, bytes(content))
        done = _run(cli, folder, eager_artifact)
        if done.code:
            _told(done)
        elif name == "model.safetensors":
            with safetensors.safe_open(folder / name, "pt") as f:  # type: ignore[no-untyped-call]
                found = {n: (f.get_slice(n).get_dtype(), tuple(f.get_slice(n).get_shape())) for n in f.keys()}  # noqa: SIM118
            assert found == shapes

    fuzz()


def _shards(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The same checkpoint in two files. Its index."""
    from safetensors.torch import load_file, save_file

    _linked(checkpoint, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(checkpoint / "model.safetensors")
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    return {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}


@_slow(20, 300)
def test_index(cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path, examples: int) -> None:
    """Shards that the index names wrongly, or that are not there, are told."""
    folder = tmp_path / "model"
    index = _shards(checkpoint, folder)
    file = folder / "model.safetensors.index.json"
    _replace(file, json.dumps(index).encode())
    assert _run(cli, folder, eager_artifact).out == _run(cli, checkpoint, eager_artifact).out
    files = st.sampled_from(
        ["a.safetensors", "c.safetensors", "", ".", "..", "/etc/passwd", "../a", "x" * 300, "\0", "é"]
    )

    @_fuzz(examples)
    @given(st.sampled_from(sorted(index["weight_map"])), st.sampled_from(STRANGE) | files, st.booleans())
    def fuzz(name: str, value: Any, whole: bool) -> None:
        changed = (
            _with(index, "weight_map", value)
            if whole
            else _with(index, "weight_map", _with(index["weight_map"], name, value))
        )
        _replace(file, json.dumps(changed).encode())
        if changed != index:
            _told(_run(cli, folder, eager_artifact))

    fuzz()


@pytest.mark.parametrize("dtype", ["I32", "F8_E4M3", "BOOL", "F64", "C64", "X"])
@pytest.mark.parametrize("shape", [(64,), (63,), (64, 1), (2, 32), ()])
def test_tensors_of_another_kind(
    dtype: str, shape: tuple[int, ...], cli: Any, checkpoint: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    """A float64 norm is as good as a float32 one; nothing else is."""
    from safetensors.torch import load_file, save_file

    kinds = {"I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn, "BOOL": torch.bool, "F64": torch.float64,
             "C64": torch.complex64}  # fmt: skip
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(shape).to(kinds.get(dtype, torch.float32))
    folder = _linked(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    if dtype == "X":
        content = (folder / "model.safetensors").read_bytes()
        _replace(folder / "model.safetensors", content.replace(b'"dtype":"F32"', b'"dtype":"X32"'))
    done = cli("compile", folder, "--target", "cpu", "--backend", "eager", "--output", tmp_path / "made")
    if (dtype, shape) == ("F64", (64,)):
        assert done.code == 0
    else:
        assert (done.code, done.out) == (2, "")
        assert "model.norm.weight" in done.err or dtype == "X"


# --- options


TYPES = {int: 1, float: 0.5, str: "x", bool: True}
SETTINGS = {name: d for name, d in definitions(EngineConfig).items() if name != "logits_processors"}


@_slow(400, 3000)
def test_settings(examples: int) -> None:
    """A setting has its type and range, or there is an error with its name."""

    @_fuzz(examples)
    @given(
        st.sampled_from(sorted(SETTINGS)),
        st.sampled_from(STRANGE[:-1]) | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3),
    )
    def fuzz(name: str, value: Any) -> None:
        try:
            args = EngineArgs(**{name: value})
        except ConfigError as mistake:
            told = str(mistake)
            assert told.startswith(name), told
            return
        stored = getattr(args, name)
        d = SETTINGS[name]
        assert stored == d.unsaid or d.setting.parse or _is_of(stored, str(d.said)), (name, stored)

    fuzz()


def _is_of(value: Any, kind: str) -> bool:
    """Whether a stored value is of the type that docs/settings.md states."""
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int):
        return "int" in kind or "float" in kind
    if isinstance(value, float):
        return "float" in kind and value == value and abs(value) != float("inf")
    return not isinstance(value, str) or "str" in kind or "Path" in kind or repr(value) in kind


@_slow(400, 3000)
def test_sampling_parameters(examples: int) -> None:
    """A parameter has its type and range, or there is an error with its name."""

    @_fuzz(examples)
    @given(
        st.sampled_from(sorted(parameters(SamplingParams))),
        st.sampled_from(STRANGE[:-1])
        | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3)
        | st.lists(st.sampled_from(STRANGE[:-1]), max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), st.sampled_from(STRANGE[:-1]), max_size=2),
    )  # fmt: skip
    def fuzz(name: str, value: Any) -> None:
        try:
            made = SamplingParams(**{name: value})
        except ConfigError as mistake:
            told = str(mistake)
            assert name in told, told
            return
        assert SamplingParams(**{name: getattr(made, name)}) == made
        hash(made)

    fuzz()


TEXTS = [
    "x", "", "1e30", "nan", "inf", "-1", "0", "1", "2", "1.5", "9" * 20, "9" * 5000, "2GiB", "/dev/null", "a" * 300,
    "/proc/self", "None", "é",
]  # fmt: skip
SMALL = ("--backend", "eager", "--target", "cpu", "--max-num-seqs", 2, "--max-num-batched-tokens", 16)
SHORT = ("--input-len", 4, "--output-len", 2, "--quiet")
# Fixed arguments of each command, and options that wait for somebody.
COMMANDS: dict[tuple[str, ...], tuple[tuple[object, ...], tuple[str, ...]]] = {
    ("compile",): (SMALL, ("model",)),
    ("run",): ((*SMALL, "--temperature", 0, "--max-tokens", 2, "--quiet", "--prompt", "hello"), ("file",)),
    ("inspect",): ((), ()),
    ("bench", "throughput"): ((*SMALL, "--num-prompts", 2, *SHORT), ("num_prompts", "n", "output_len", "input_len")),
    ("bench", "latency"): (
        (*SMALL, "--num-iters", 1, "--num-iters-warmup", 0, *SHORT),
        ("num_iters", "num_iters_warmup", "batch_size", "output_len", "input_len"),
    ),
    ("bench", "serve"): (("--url", "http://127.0.0.1:9", "--quiet"), ("url",)),
    ("op", "test"): ((), ()),
    ("op", "bench"): (("swiglu",), ("name", "output")),
}  # fmt: skip


def _options() -> list[tuple[tuple[str, ...], str]]:
    """Every option that takes a value, with its command."""
    from graphllm.cli.app import command_line

    found = []
    for path, (_, without) in COMMANDS.items():
        command: Any = command_line()
        for part in path:
            command = command.commands[part]
        found += [
            (path, p.opts[0] if p.param_type_name == "option" else "")
            for p in command.params
            if p.name not in ("help", *without) and not getattr(p, "is_flag", False)
        ]
    return found


@_slow(12, 900)
def test_options(cli: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    """No text behind an option gives a traceback."""
    monkeypatch.chdir(tmp_path)
    answers: set[str] = set()

    @_fuzz(examples)
    @given(st.sampled_from(_options()), st.sampled_from(TEXTS))
    def fuzz(place: tuple[tuple[str, ...], str], text: str) -> None:
        path, option = place
        model = ("--model", checkpoint) if path[0] == "run" or path[-1] in ("throughput", "latency") else ()
        fixed = COMMANDS[path][0]
        done = cli(
            *path,
            *((checkpoint,) if path == ("compile",) else model),
            *fixed,
            *([f"{option}={text}"] if option else [text]),
        )
        assert done.code in (0, 1, 2), done
        assert done.err.count("graphllm: ") <= 1
        if done.code == 0 and path == ("run",) and option in ("--block-size", "--max-logprobs", "--threads"):
            answers.add(done.out)

    fuzz()
    assert len(answers) <= 1
