"""The tokenizer of a GGUF file as the files of a checkpoint folder: tokenizer.json and tokenizer_config.json.
Importing this imports the library of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphllm.config import ConfigError

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_UNKNOWN = 2
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Split(NamedTuple):
    """How text is cut before merging. pattern: None for GPT-2's; digits: each is a word. ignore_merges: words that are
    tokens stay whole. bos: whether one comes first where the file does not say."""

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    bos: bool = False
    nfc: bool = False


# By tokenizer.ggml.pre, as llama.cpp names them.
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "llama-bpe": _Split(_ENGLISH + r"\p{N}{1,3}" + _REST, ignore_merges=True, bos=True),
    "qwen2": _Split(_ENGLISH + r"\p{N}" + _REST, nfc=True),
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, file: Path) -> None:
    """Write the files. file: for messages. Raises ConfigError for a tokenizer that cannot be read."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise _bad(file, f"tokenizer.ggml.model is {kind!r:.80}; {', '.join(_MODELS)} are read")
    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        raise _bad(file, "the file has no tokens")
    tokenizer, bos = _MODELS[kind](metadata, file)
    _add_special(tokenizer, metadata, bos, file)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config: dict[str, Any] = {n: tokens[i] for n, i in ids.items() if isinstance(i, int) and i < len(tokens)}
    if template := metadata.get("tokenizer.chat_template"):
        start = "tokenizer.chat_template."
        named = {"default": template, **{k.removeprefix(start): v for k, v in metadata.items() if k.startswith(start)}}
        several = [{"name": name, "template": text} for name, text in named.items()]
        config["chat_template"] = template if len(several) == 1 else several
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _byte_pairs(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, bool]:
    """Merges of bytes, as GPT-2 has them."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _SPLITS:
        raise _bad(file, f"tokenizer.ggml.pre is {pre!r:.80}; {', '.join(_SPLITS)} are read")
    split = _SPLITS[pre]
    pairs = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    ids = _vocabulary(metadata)
    if lost := [pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()]:
        raise _bad(
            file, f"tokenizer.ggml.merges has {' '.join(lost[0])!r:.80}, but its parts or the whole are no tokens"
        )
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, split.bos


def _sentence_pieces(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, bool]:
    """Pieces of SentencePiece's BPE: the two neighbours are merged that make the piece with the best score."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise _bad(file, f"{len(tokens)} tokens have {len(scores)} scores")
    ids = _vocabulary(metadata)
    merges: list[tuple[str, str]] = []
    for _, piece in sorted(zip(scores, tokens, strict=True), key=lambda pair: -pair[0]):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += sorted((c for c in cuts if c[0] in ids and c[1] in ids), key=lambda c: (ids[c[0]], ids[c[1]]))
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    unknown = next((t for t, kind in zip(tokens, kinds, strict=False) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, *ends])
    return tokenizer, True


_MODELS: dict[str, Callable[[Mapping[str, Any], Path], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_pairs,
    "llama": _sentence_pieces,
}


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any], bos: bool, file: Path) -> None:
    """Tokens that text is searched for before anything else, and those around a text. bos: whether one comes first
    where the file does not say."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    single, special = ["$A"], []
    for name, usual in (("bos", bos), ("eos", False)):
        number, said = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get(f"tokenizer.ggml.add_{name}_token")
        there = isinstance(number, int) and number < len(tokens)
        if said and not there:
            raise _bad(file, f"tokenizer.ggml.add_{name}_token is true, but {name}_token_id is {number!r:.80}")
        if there and (usual if said is None else said):
            single.insert(0 if name == "bos" else len(single), tokens[number])
            special.append((tokens[number], number))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _bad(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file}: {why}; give --tokenizer FOLDER, that of the original model")
