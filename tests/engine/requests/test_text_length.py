"""Texts that are far too long: refused before they are tokenized, and never one that fits; in turns, which can end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests import text_length
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.requests.text_length import encode_at_most
from graphllm.entrypoints.async_llm import AsyncLLM
from tests.engine.stub_core import info
from tests.tiers import draws
from tests.waiting import until_async

TEXT = ["Hello world, how are you?", "  indented    text ", "ÄÖÜ äöü ﷺ 🏳 e\u0301e\u0301", "aaaaaaaaaaaaaaaa bbbb"] * 3


def byte_level(normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        t.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    t.add_special_tokens(["<|im_start|>"])
    return t


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁Helo,wrdab", "▁▁", "aa"])}
    merges = [("▁", "▁"), ("a", "a")]
    t = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return t


def with_token(token: AddedToken) -> tokenizers.Tokenizer:
    t = byte_level()
    t.add_tokens([token])
    return t


def word_pieces() -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return t


def unigram() -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0)], 0, False))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    return t


def removing() -> tokenizers.Tokenizer:
    t = byte_level()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)])
    return t


def no_unknown() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"a": 0}, []))  # drops everything else


BOUND: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": byte_level,
    "bytes of composed letters": lambda: byte_level(normalizers.NFC()),
    "bytes of decomposed letters": lambda: byte_level(normalizers.NFKD()),
    "bytes of several": lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "shorter words": lambda: byte_level(normalizers.Replace("Hello", "Hi")),
    "fallback to bytes": byte_fallback,
    "a long added token": lambda: with_token(AddedToken("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", normalized=True)),
}
UNBOUND: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str]] = {
    "spaces around a token": (lambda: with_token(AddedToken("<end>", rstrip=True)), "<end>" + " " * 9000),
    "stripped": (lambda: byte_level(normalizers.Strip()), "a" + " " * 9000),
    "accents": (
        lambda: byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "a" + "\u0301" * 9000
    ),
    "pattern": (lambda: byte_level(normalizers.Replace(tokenizers.Regex(" +"), " ")), "a" + " " * 9000),
    "nothing": (lambda: byte_level(normalizers.Replace("ab", "")), "ab" * 9000 + "c"),
    "words": (word_pieces, "x" * 9000),
    "unknown": (unigram, "x" * 9000),
    "removed": (removing, "a" + " " * 9000),
    "dropped": (no_unknown, "x" * 9000 + "a"),
}  # fmt: skip
PARTS = [
    "Hello", " ", "    ", "\n", "a", "aaaaaaaaaaaaaaaa", "a" * 40, "ab", "Ä", "e\u0301", "\u03b1\u0313\u0300\u0345",
    "ﷺ", "🏳", "<|im_start|>", "İ", "<end>",
]  # fmt: skip


def load(folder: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def steps(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
    *_, ids = encode_at_most(tokenizer, text, limit)
    assert ids is not None
    return ids


@pytest.mark.parametrize("name", BOUND)
def test_what_fits_is_never_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At a limit that is the length, in pieces of a few characters; and the bound holds for every text."""
    tokenizer = load(tmp_path, BOUND[name]())
    bound = tokenizer.characters_per_token
    assert bound is not None
    monkeypatch.setattr(text_length, "PIECE", 50)

    @settings(deadline=None, derandomize=True, max_examples=draws(20, 60))
    @given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.integers(1, 40))
    def check(text: str, times: int) -> None:
        ids = tokenizer.encode(text * times)
        assert len(text * times) <= bound * len(ids)
        assert steps(tokenizer, text * times, len(ids)) == ids

    check()


@pytest.mark.parametrize("name", UNBOUND)
def test_where_there_is_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Thousands of characters are a token or two, and taken; what is many tokens is refused all the same."""
    make, text = UNBOUND[name]
    tokenizer = load(tmp_path, make())
    assert tokenizer.characters_per_token is None
    ids = tokenizer.encode(text)
    assert len(ids) <= 2
    monkeypatch.setattr(text_length, "PIECE", 1000)
    assert steps(tokenizer, text, 2) == ids
    with pytest.raises(ConfigError, match=r"prompt has 20000 characters; the first \d+ are more than \d+ tok"):
        steps(tokenizer, "a " * 10_000, 50)
    with pytest.raises(ConfigError, match="prompt has 2000000 characters: there is room for 50 tokens"):
        steps(tokenizer, "a " * 1_000_000, 50)


def test_megabytes_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one function that the server, `LLM` and the command line make requests with."""
    processor = Processor(load(tmp_path, byte_level()), info(1000))
    text = "Hello world, how are you? " * 1_200_000  # 31 MB
    monkeypatch.setattr(Tokenizer, "encode", None)  # not a piece of it is tokenized
    for prompt in (text, {"prompt": text, "add_special_tokens": False}):
        with pytest.raises(ConfigError, match=r"^prompt has 31200000 characters, which are at least .*--max-model-len"):
            processor.make(prompt, SamplingParams(), "r")


def test_turns_end_with_their_reader(tmp_path: Path) -> None:
    """Two long texts are tokenized piece by piece in turns, and no further for one who has left."""
    tokenizer = load(tmp_path, byte_level())
    seen: list[str] = []

    class Slow:
        characters_per_token = 10**6

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            seen.append(text[:1])
            time.sleep(0.02)
            return tokenizer.encode(text[:8])

    async def run() -> None:
        engine = AsyncLLM(None, Slow())  # type: ignore[arg-type]
        left, stays = (asyncio.create_task(engine.token_ids(letter * 2_000_000, 2000)) for letter in "ab")
        await until_async(lambda: len(seen) >= 6)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        gone = seen.count("a")
        await stays
        assert left.cancelled()
        assert seen.count("a") <= gone + 1  # the one at which it was
        assert seen.count("b") == 2_000_000 // text_length.PIECE + 2
        assert "ab" in "".join(seen[:6])
        assert "ba" in "".join(seen[:6])

    asyncio.run(run())
