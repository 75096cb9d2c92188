"""GGUF files: every block type gives exactly the numbers of the package `gguf`, whole files give transformers' logits
and the original tokenizer's ids, and broken files are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer as Backend
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError, EngineArgs
from graphllm.embedded import MODEL_DIR
from graphllm.engine.requests.text import Tokenizer
from graphllm.loading.checkpoint.conversion import tokenizer_folder
from graphllm.loading.checkpoint.gguf_folder import gguf_folder
from graphllm.loading.checkpoint.gguf_tokenizer import write_tokenizer
from graphllm.loading.checkpoint.source import find_source
from graphllm.ops.encodings.gguf_blocks import TILED
from graphllm.weights.checkpoint.gguf.header import TYPES, read_gguf
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan.expr import Encode
from graphllm.weights.plan.plan import WeightPlan
from tests.tiers import thorough

_COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_COMMON, head_dim=16)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=True)),
    "qwen3moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**_COMMON, head_dim=16, **_MOE)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random halves are infinite at times
@pytest.mark.parametrize("name", [t.name for t in TYPES.values()])
def test_numbers_are_those_of_the_format(name: str) -> None:
    kind = next(t for t in TYPES.values() if t.name == name)
    blocks = np.random.default_rng(3).integers(0, 256, (6, 512 // kind.entries * kind.nbytes), dtype=np.uint8)
    plain = {"f32": np.float32, "f16": np.float16}.get(name, np.uint8)
    wanted = gguf.dequantize(blocks.view(plain), gguf.GGMLQuantizationType[name.upper()]).astype(np.float32)
    found = encoding_of(f"gguf_{name}").decode({"blocks": torch.from_numpy(blocks)}, 6, 512).numpy()
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.5
    assert np.array_equal(found.view(np.int32)[finite], wanted.view(np.int32)[finite])


@pytest.mark.parametrize("rows", [32, 40])
@pytest.mark.parametrize("name", [f"gguf_{kind}{head}" for kind in TILED for head in ("", "-8")])
def test_what_is_repacked_for_kernels_stands_for_the_same_numbers(name: str, rows: int) -> None:
    """Also in the order of rows of queries and keys."""
    kind = next(t for t in TYPES.values() if name.startswith(f"gguf_{t.name}"))
    draw = torch.Generator().manual_seed(rows)
    drawn = torch.randint(0, 256, (rows, 512 // kind.entries * kind.nbytes), dtype=torch.uint8, generator=draw)
    encoding = encoding_of(name)
    wanted = encoding.decode({"blocks": drawn}, rows, 512)
    assert len(encoding.repacked) == (2 if kind.name == "q4_0" else 1)
    for other, repack in encoding.repacked:
        parts = repack({"blocks": drawn}, rows, 512, None)
        found = encoding_of(other).decode(parts, rows, 512)
        for part in encoding_of(other).parts:
            assert parts[part.name].shape == part.shape(rows, 512)
        assert torch.equal(found.nan_to_num(1.0), wanted.nan_to_num(1.0))


def _write(
    file: Path, kind: str, model: Any, quantized: str, told: dict[str, Any] | None = None, **writer: Any
) -> None:
    """The model as llama.cpp's converter writes it. Its weights become those that the file stands for. told: further
    fields."""
    made, c = gguf.GGUFWriter(file, kind, **writer), model.config
    made.add_block_count(c.num_hidden_layers)
    made.add_context_length(c.max_position_embeddings)
    made.add_embedding_length(c.hidden_size)
    made.add_feed_forward_length(c.intermediate_size)
    made.add_head_count(c.num_attention_heads)
    made.add_head_count_kv(c.num_key_value_heads)
    made.add_key_length(c.head_dim)
    made.add_layer_norm_rms_eps(c.rms_norm_eps)
    made.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if "moe" in kind:
        made.add_expert_count(c.num_experts)
        made.add_expert_used_count(c.num_experts_per_tok)
        made.add_expert_feed_forward_length(c.moe_intermediate_size)
    stored = {own: t for own, t in model.state_dict().items() if own != "lm_head.weight" or not c.tie_word_embeddings}
    for own, tensor in stored.items():
        for name, part in _parts(own, tensor).items():
            own = next((t for n, t in _MIXED.items() if n in name), "Q5_0") if quantized == "mixed" else quantized
            _add(made, name, part, c if kind == "llama" else None, gguf.GGMLQuantizationType[own])
    add = {bool: made.add_bool, int: made.add_uint32, float: made.add_float32, str: made.add_string}
    for key, value in (told or {}).items():
        add[type(value)](key, value)
    _words(made, json.loads((MODEL_DIR / "tokenizer.json").read_text()))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


_MIXED = {
    "token_embd": "Q8_0", "attn_v": "Q8_0", "blk.0.ffn_down": "Q5_1", "ffn_gate": "Q4_1", "ffn_up": "Q4_1"
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


def _parts(own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """llama.cpp's tensors, views of transformers' one: it stacks gates and ups of experts together."""
    path = own.removesuffix(".weight").split(".")
    layer, name = ("", ".".join(path)) if path[1:2] != ["layers"] else (f"blk.{path[2]}.", ".".join(path[3:]))
    if name == "mlp.experts.gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        return {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
    return {f"{layer}{_NAMES[name]}.weight": tensor}


@torch.no_grad()
def _add(writer: Any, name: str, tensor: torch.Tensor, llama: Any, type_: Any) -> None:
    turned = llama is not None and ("attn_q." in name or "attn_k." in name)
    data = tensor.unflatten(0, (-1, 2, llama.head_dim // 2)).transpose(1, 2).flatten(0, 2) if turned else tensor
    if tensor.ndim == 1 or "gate_inp" in name:
        writer.add_tensor(name, data.numpy())
        return
    stored = gguf.quantize(np.ascontiguousarray(data.numpy()), type_)
    writer.add_tensor(name, stored, raw_dtype=type_)
    numbers = torch.from_numpy(gguf.dequantize(stored, type_).astype(np.float32))
    tensor.copy_(
        numbers.unflatten(0, (-1, llama.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) if turned else numbers
    )


def _words(writer: Any, tokenizer: dict[str, Any]) -> None:
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if i in special else 1 for i in range(len(words))])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"])


def _tiny(kind: str) -> Any:
    torch.manual_seed(7)
    make, config = _MODELS[kind]
    return make(config).eval()


_COMPILED = pytest.param("llama", "mixed", "inductor", marks=pytest.mark.slow)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "quantized", "backend"),
    [
        ("llama", "Q8_0", "eager"), ("llama", "F16", "eager"), ("qwen3", "Q4_0", "eager"),
        ("qwen3", "mixed", "eager"), ("qwen3moe", "Q5_1", "eager"), _COMPILED,
    ],
)  # fmt: skip
def test_logits(kind: str, quantized: str, backend: Any, tmp_path: Path) -> None:
    model = _tiny(kind)
    _write(tmp_path / "model.gguf", kind, model, quantized)
    from tests.models import driver

    runner = driver.Driver(gguf_folder(tmp_path / "model.gguf"), backend)
    prompt = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, _ = runner.generate([prompt], 1)
    wanted, far = model(torch.tensor([prompt])).logits[0, -1], 1e-4 if backend == "eager" else 2e-2  # rounds x
    torch.testing.assert_close(logits[0], wanted, rtol=far, atol=far)
    if quantized != "mixed":
        return
    plan = WeightPlan.from_json((runner.place / "weights.json").read_text())
    assert [e.name for e in plan if len(e.shape) == 2] == []  # nothing is decoded
    kept = {e.name: e.expr.encoding for e in plan if isinstance(e.expr, Encode)}
    assert [kept[f"layers.0.qkv.{i}.tiles"] for i in (0, 1)] == ["tiled_q5_0", "tiled_q8_0"]
    assert [kept[f"layers.{i}.down.tiles"] for i in (0, 1)] == ["tiled_q5_1", "tiled_q5_0"]
    if kind == "qwen3":
        assert plan["head.lm_head.tiles"].tie == "embed.tokens.tiles"


@torch.no_grad()
def test_two_ranks(tmp_path: Path) -> None:
    """Blocks of the table, which the head is tied to, and of every kind of product are divided and stay as they are."""
    torch.manual_seed(7)
    model = Qwen3ForCausalLM(Qwen3Config(**_COMMON | {"intermediate_size": 128}, tie_word_embeddings=True)).eval()
    _write(tmp_path / "model.gguf", "qwen3", model, "mixed")
    from tests.models import driver, sharded

    opened: list[Any] = []

    def ranks_of(place: Path, checkpoint: Any) -> Any:
        opened.append(sharded.Sharded(place, checkpoint, 2, num_blocks=64))
        return opened[0]

    folder, settings = gguf_folder(tmp_path / "model.gguf"), {"tensor_parallel_size": 2}
    runner = driver.Driver(folder, "eager", settings=settings, opened=ranks_of)
    plan = WeightPlan.from_json((runner.place / "weights.json").read_text())
    assert [e.name for e in plan if len(e.shape) == 2] == []
    prompt = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    with opened[0]:
        logits, _ = runner.generate([prompt], 1)
    torch.testing.assert_close(logits[0], model(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_tokenizer_and_settings_are_the_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _write(file, "llama", _tiny("llama"), "Q8_0")
    tokenizer = Tokenizer.from_folder(tokenizer_folder(tmp_path))
    original = Backend.from_file(str(MODEL_DIR / "tokenizer.json"))
    for text in ("What is 12 + 7?", "It's  naïve — 2024 日本!\n\n  done", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.eos_id, "im_start" in tokenizer.chat_template) == (2, True)
    by_folder = find_source(EngineArgs(model=str(tmp_path)))
    assert by_folder.config == find_source(EngineArgs(model=str(file))).config
    assert by_folder.config["architectures"] == ["LlamaForCausalLM"]


_ENDS = [
    thorough({}, {2}),
    ({"tokenizer.ggml.eot_token_id": 5}, {2, 5}),
    thorough({"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 6}, {2, 6}),
]


@pytest.mark.parametrize(("told", "ends"), _ENDS)
def test_what_ends_a_text(told: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    """The ends of a text, of a turn and of a message. A file that does not number the end of a turn has it by name:
    the embedded model's, <|im_end|>, is 2."""
    file = tmp_path / "model.gguf"
    _write(file, "llama", _tiny("llama"), "Q8_0", told)
    with LLM(str(file), backend="eager", max_num_seqs=1, max_model_len=32, kv_cache_memory_bytes=1 << 20) as llm:
        for token in (2, 5, 6):
            params = SamplingParams(logit_bias={token: 100.0}, max_tokens=3, temperature=0)
            output = llm.generate({"prompt_token_ids": [9]}, params, use_tqdm=False)[0].outputs[0]
            assert output.finish_reason == ("stop" if token in ends else "length")


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True, False])
def test_what_stands_around_a_text(bos: bool | None, eos: bool | None, tmp_path: Path) -> None:
    """As the flags of the file say; without them nothing for this kind of tokenizer."""
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    words = json.loads((MODEL_DIR / "tokenizer.json").read_text())["model"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(words["vocab"], key=words["vocab"].__getitem__),
        "tokenizer.ggml.merges": [" ".join(m) for m in words["merges"]],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in flags.items() if value is not None},
    }  # fmt: skip
    write_tokenizer(metadata, tmp_path, tmp_path / "a.gguf")
    plain = Backend.from_file(str(MODEL_DIR / "tokenizer.json")).encode("two cats", add_special_tokens=False).ids
    found = Tokenizer.from_folder(tmp_path, {}, {}).encode("two cats")
    assert found == [1] * (bos is True) + plain + [2] * (eos is True)
    if eos:
        with pytest.raises(ConfigError, match="add_eos_token is true, but eos_token_id is None"):
            write_tokenizer(metadata | {"tokenizer.ggml.eos_token_id": None}, tmp_path, tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, only 16 is supported"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length is 32, only 16"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False, only True"),
        ({"llama.expert_gating_func": 2}, "llama.expert_gating_func is 2, only 1"),
    ],
)
def test_settings_of_other_models_are_refused(told: dict[str, Any], message: str, tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", "llama", _tiny("llama"), "Q8_0", told)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(tmp_path / "model.gguf")


def test_unknown_fields_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = {"llama.rope.dimension_count": 16, "llama.vocab_size": 128, "llama.new": 1, "general.name": "x"}
    _write(tmp_path / "model.gguf", "llama", _tiny("llama"), "Q8_0", told)
    gguf_folder(tmp_path / "model.gguf")
    assert "model.gguf: llama.new: not read, and without effect here" in caplog.text


@pytest.mark.slow
def test_the_embedded_model_answers(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _write(file, "llama", LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32), "Q8_0")
    llm = LLM(str(file))
    found = llm.chat([{"role": "user", "content": "What is 12 + 7?"}], SamplingParams(temperature=0, max_tokens=32))
    assert found[0].outputs[0].text.strip() == "12 + 7 = 19."


def test_sentence_pieces(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the quick brown fox {n} jumps, over lazy dogs." for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "sp"), model_type="bpe", vocab_size=340, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids], "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(), "tokenizer.ggml.eos_token_id": model.eos_id(),
    }  # fmt: skip
    write_tokenizer(metadata, tmp_path, tmp_path / "a.gguf")
    tokenizer = Tokenizer.from_folder(tmp_path, {}, {})
    for said in ("the quick lazy fox", "over 7 brown  dogs, naïve 日本"):
        assert tokenizer.encode(said) == [model.bos_id(), *model.encode(said)]
        assert tokenizer.decode(tokenizer.encode(said)) == said
    with pytest.raises(ConfigError, match=r"pre is 'unheard'; .* give --tokenizer FOLDER"):
        write_tokenizer(metadata | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard"}, tmp_path, text)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", "llama", _tiny("llama"), "Q8_0", split_max_tensors=8)
    first = min(tmp_path.glob("*-00001-of-*.gguf"))
    assert len(read_gguf(first).tensors) == 21
    assert find_source(EngineArgs(model=str(tmp_path))).checkpoint is not None
    with pytest.raises(ConfigError, match="name the first"):
        read_gguf(first.with_name(first.name.replace("-00001-", "-00002-")))
    first.with_name(first.name.replace("-00001-", "-00002-")).unlink()
    with pytest.raises(ConfigError, match=r"-00002-of-.* is not there"):
        find_source(EngineArgs(model=str(first)))


def _header(tensors: list[tuple[str, tuple[int, ...], int, int]], data: int, version: int = 3) -> bytes:
    """A file without metadata of tensors (name, dims from the innermost on, type, offset) and so many bytes of data."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 0)
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32 + data)


_BROKEN = {
    "it begins with b'GGML'": b"GGML" + bytes(60),
    "of version 1": _header([], 0, version=1),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "its header has more": _header([("a", (32,), 0, 0)], 128)[:40],
    "tensor a ends at": _header([("a", (32,), 0, 0)], 96),
    "tensor b overlaps tensor a": _header([("a", (32,), 0, 0), ("b", (32,), 0, 64)], 256),
    "no multiple of 32": _header([("a", (8,), 0, 8)], 256),
    "33 is no multiple of q8_0's 32": _header([("a", (33,), 8, 0)], 256),
    "of type iq1_s, which cannot be read": _header([("a", (256,), 19, 0)], 256),
    "of type 99": _header([("a", (256,), 99, 0)], 256),
    "general.architecture is None": _header([("a", (32,), 0, 0)], 128),
}


@pytest.mark.parametrize("why", _BROKEN)
def test_broken_files_are_refused_by_name(why: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(_BROKEN[why])
    with pytest.raises(ConfigError, match=rf"broken\.gguf: .*{why.replace('[', '.')}"):
        find_source(EngineArgs(model=str(file)))


def test_which_file_is_meant(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(_header([], 0))
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files; name one, such as .*a\.gguf"):
        find_source(EngineArgs(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="is not there; give the path of a GGUF file"):
        find_source(EngineArgs(model=str(tmp_path / "c.gguf")))
