"""Older files of checkpoints: .bin weights and tokenizers of other kinds are converted once, by a process that runs
nothing of theirs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError, EngineArgs
from graphllm.engine.requests.text import Tokenizer
from graphllm.loading.checkpoint import conversion, weights_worker
from graphllm.loading.checkpoint.conversion import tokenizer_folder
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.loading.checkpoint.source import find_source, find_tokenizer
from graphllm.loading.checkpoint.tensors import open_tensors
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from tests.hub import files_of, fill_cache

pytestmark = pytest.mark.usefixtures("cache")  # what was converted or downloaded before is not there

SENTENCES = ["hello world, the cat sat on the mat", "what is the answer to the question", "a list of words in a row"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
EAGER = {
    "enforce_eager": True, "target": "cpu", "kv_cache_memory_bytes": 1 << 20, "max_model_len": 96, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "block_size": 8,
}  # fmt: skip


class _Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def train_sentencepiece(folder: Path) -> None:
    """A tiny sentencepiece tokenizer, as Llama's checkpoints have them."""
    import sentencepiece

    corpus = folder / "corpus.text"
    corpus.write_text("\n".join(SENTENCES * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, minloglevel=2, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    corpus.unlink()
    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "add_bos_token": True, "legacy": False}))


def written(file: Path, tensors: Mapping[str, Any], **options: Any) -> Mapping[str, torch.Tensor]:
    """What the worker makes of a .bin file."""
    torch.save(tensors, file, **options)
    weights_worker._convert(file, file.with_suffix(".safetensors"))
    return load_file(file.with_suffix(".safetensors"))


@pytest.mark.thorough
def test_an_old_checkpoint_of_the_hub_runs(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """.bin weights and a sentencepiece tokenizer, no architecture named: the same tokens as of the safetensors, and the
    ids that sentencepiece itself gives."""
    import sentencepiece

    old = tmp_path / "old"
    old.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    del config["architectures"]
    (old / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint / "model.safetensors")
    files = {name: f"pytorch_model-0000{number % 2 + 1}-of-00002.bin" for number, name in enumerate(tensors)}
    for file in {*files.values()}:
        torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, old / file)
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    train_sentencepiece(old)
    fill_cache(tmp_path / "hub", "tiny/old", files_of(old))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    with LLM("tiny/old", **EAGER) as llm:
        ours = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        processor = sentencepiece.SentencePieceProcessor(model_file=str(old / "tokenizer.model"))
        for text in (*SENTENCES, "strange: é 漢字\n  two"):
            assert llm.get_tokenizer().encode(text)[1:] == processor.encode(text)
        assert llm.get_tokenizer().eos_id == processor.eos_id()
    with LLM(checkpoint, **EAGER) as llm:
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == ours
    assert [r.getMessage().count(" once, into ") for r in caplog.records if "converting" in r.message] == [1, 1]
    monkeypatch.delattr(conversion.subprocess, "run")  # the second time nothing is converted
    args = EngineArgs("tiny/old")
    assert find_tokenizer(args, find_source(args)).is_relative_to(tmp_path / "cache")


def test_tensors_of_any_kind(tmp_path: Path) -> None:
    big = torch.arange(24.0).view(4, 6)
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(), "half": torch.randn(2).half(), "slice": big[1:3, ::2], "t": big.T,
        "scalar": torch.tensor(7), "empty": torch.zeros(0, 3), "bool": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    for zipped in (True, False):  # before torch 1.6 they were no zip files
        found = written(tmp_path / "x.bin", tensors, _use_new_zipfile_serialization=zipped)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert found[name].float().equal(tensor.detach().float())


@pytest.mark.parametrize(
    "held", [[torch.zeros(2)], {"model": {"w": torch.zeros(2)}}, {"w": 3}, {}, {"s": torch.eye(2).to_sparse()}]
)
def test_what_is_no_tensors_by_name(tmp_path: Path, held: Any) -> None:
    with pytest.raises(ValueError, match=r"holds (something else than|a (list|dict), and no) tensors by name"):
        written(tmp_path / "x.bin", held)


def test_shards_of_which_one_is_missing(tmp_path: Path, checkpoint: Path) -> None:
    torch.save({"a": torch.zeros(2, 2)}, tmp_path / "a.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "a.bin", "b": "b.bin"}}))
    with pytest.raises(ConfigError, match=r"its index names 'b.bin', which is not there; download it"):
        open_tensors(ModelFiles.read(tmp_path), "auto")
    shutil.copy(checkpoint / "model.safetensors", tmp_path)  # comes first, and the others are never opened
    assert len(open_tensors(ModelFiles.read(tmp_path), "auto")[0].tensors) > 2  # type: ignore[union-attr]
    assert len(open_tensors(ModelFiles.read(tmp_path), "safetensors")[0].tensors) > 2  # type: ignore[union-attr]


def _indexed(folder: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], index: Mapping[str, str]) -> list[Path]:
    """The files of a checkpoint in shards."""
    for name, tensors in shards.items():
        torch.save(tensors, folder / name)
    file = folder / "pytorch_model.bin.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    return [*(folder / name for name in shards), file]


@pytest.mark.parametrize("copy_in", ["a.bin", "c.bin"])
def test_the_index_says_which_copy_of_a_tensor_counts(tmp_path: Path, copy_in: str) -> None:
    """Of a tensor that two shards have."""
    shards = {f"{n}.bin": {n: torch.full((2,), float(i))} for i, n in enumerate("abc")}
    shards[copy_in] = {**shards[copy_in], "b": torch.full((2,), 9.0)}
    files = _indexed(tmp_path, shards, {n: f"{n}.bin" for n in "abc"})
    weights_worker.convert(tmp_path, files)
    found = Checkpoint.open(tmp_path).tensors
    assert found.keys() == {*"abc"}
    assert load_file(found["b"].file)["b"].tolist() == [1.0, 1.0]


@pytest.mark.thorough
def test_another_index_of_the_same_shards_is_another_conversion(tmp_path: Path) -> None:
    shards = {"a.bin": {"w": torch.zeros(2)}, "b.bin": {"w": torch.ones(2)}}
    for file, value in (("a.bin", 0.0), ("b.bin", 1.0)):
        _indexed(tmp_path, shards, {"w": file})
        found = open_tensors(ModelFiles.read(tmp_path), "auto")[0]
        assert found is not None
        assert load_file(found.tensors["w"].file)["w"].tolist() == [value] * 2


def test_what_is_wrong_with_shards_names_the_shard(tmp_path: Path) -> None:
    shards = {f"{n}.bin": {n: torch.zeros(999)} for n in "ab"}
    files = _indexed(tmp_path, shards, {"a": "a.bin", "b": "b.bin", "lost": "b.bin"})
    with pytest.raises(ValueError, match=r"index.json says that b.bin holds lost, it does not"):
        weights_worker.convert(tmp_path, files)
    (tmp_path / "b.bin").write_bytes((tmp_path / "b.bin").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"^b.bin: "):
        weights_worker.convert(tmp_path, files)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.gguf", "config.json", "tokenizer.json", "tokenizer.model"]
)
def test_git_lfs_pointers_are_named(tmp_path: Path, checkpoint: Path, name: str) -> None:
    for file in ("config.json", *({"tokenizer.json", "model.safetensors"} if "token" in name else ())):
        shutil.copy(checkpoint / file, tmp_path)
    if name == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n")
    args = EngineArgs(str(tmp_path))

    def opened() -> Tokenizer:
        return Tokenizer.from_folder(find_tokenizer(args, find_source(args)))

    with pytest.raises(ConfigError, match=rf"{name}: is a Git-LFS pointer .*; run `git lfs pull` in its folder"):
        opened()


def test_a_pickle_that_runs_something(tmp_path: Path) -> None:
    """It does not, and nothing is left of the attempt."""
    torch.save({"w": _Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ConfigError,
        match=r"its weights cannot be converted \(pytorch_model.bin: Weights only load failed.*where you tru",
    ):
        open_tensors(ModelFiles.read(tmp_path), "auto")
    with pytest.raises(ConfigError, match=r"only pytorch_model.bin, which cannot be read; leave out --load-f"):
        raise open_tensors(ModelFiles.read(tmp_path), "safetensors")[1]  # type: ignore[misc]
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "cache" / "converted").iterdir()) == []
    pickle.loads((tmp_path / "pytorch_model.bin").read_bytes()[:0] or pickle.dumps(_Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()  # as it would elsewhere


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ConfigError, match=r"its weights need .*; make room there or set GRAPHLLM_CACHE"):
        open_tensors(ModelFiles.read(tmp_path), "auto")


@pytest.mark.slow
def test_a_tiktoken_tokenizer(tmp_path: Path) -> None:
    """The ids that tiktoken gives, by Llama 3's pattern."""
    import base64

    import tiktoken

    merged = [b"he", b"ll", b"hell", b"hello", b" t", b" th", b" the", b"wo", b"rl", b"worl"]
    ranks = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *merged])}
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern = rf"{words}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    theirs = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.from_folder(tokenizer_folder(tmp_path))
    for text in (*SENTENCES, "it's 12345  hello\n\nthe é 漢字"):
        ids = ours.encode(text, add_special_tokens=False)
        assert (ids, ours.decode(ids)) == (theirs.encode(text), text)


@pytest.mark.slow
def test_a_vocabulary_and_merges(tmp_path: Path, checkpoint: Path) -> None:
    """As GPT-2's and OPT's checkpoints have them: the ids of the tokenizer.json that holds the same."""
    told = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(told["vocab"]))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in told["merges"])
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"})
    )
    theirs, ours = Tokenizer.from_folder(checkpoint), Tokenizer.from_folder(tokenizer_folder(tmp_path))
    for text in (*SENTENCES, "it's 12345 the é"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_id == theirs.eos_id


@pytest.mark.slow
def test_a_tokenizer_that_needs_code(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "tokenization_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    told = {"tokenizer_class": "XTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"its tokenizer cannot be converted \(.*custom code"):
        tokenizer_folder(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert EngineArgs(checkpoint, tokenizer=str(tmp_path)).tokenizer == str(tmp_path)
