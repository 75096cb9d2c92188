"""The tokenizer of a GGUF file as the files of a checkpoint folder: tokenizer.json and tokenizer_config.json.
Importing this imports the library of tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphllm.config import ConfigError
from graphllm.loading.checkpoint.gguf_splits import SPLITS

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_UNKNOWN = 2
_LETTERS = re.compile("[A-Z]")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, file: Path) -> None:
    """Write the files. file: for messages. Raises ConfigError for a tokenizer that cannot be read."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise _bad(file, f"tokenizer.ggml.model is {kind!r:.80}; {', '.join(_MODELS)} are read")
    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        raise _bad(file, "the file has no tokens")
    tokenizer, around = _MODELS[kind](metadata, file)
    _add_special(tokenizer, metadata, around, file)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {
        "bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown", "cls_token": "cls",
        "sep_token": "seperator", "mask_token": "mask",
    }  # fmt: skip
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config: dict[str, Any] = {n: tokens[i] for n, i in ids.items() if isinstance(i, int) and i < len(tokens)}
    if template := metadata.get("tokenizer.chat_template"):
        start = "tokenizer.chat_template."
        named = {"default": template, **{k.removeprefix(start): v for k, v in metadata.items() if k.startswith(start)}}
        several = [{"name": name, "template": text} for name, text in named.items()]
        config["chat_template"] = template if len(several) == 1 else several
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


class _Around(NamedTuple):
    """What stands around a text where the file does not say. keys: of the numbers of the first token and the last one.
    bos, eos: whether there is one."""

    bos: bool
    eos: bool = False
    keys: tuple[str, str] = ("bos", "eos")


def _byte_pairs(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, _Around]:
    """Merges of bytes, as GPT-2 has them."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in SPLITS:
        raise _bad(file, f"tokenizer.ggml.pre is {pre!r:.80}; {', '.join(SPLITS)} are read")
    split = SPLITS[pre]
    pairs = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    ids = _vocabulary(metadata)
    if lost := [pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()]:
        raise _bad(
            file, f"tokenizer.ggml.merges has {' '.join(lost[0])!r:.80}, but its parts or the whole are no tokens"
        )
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, _Around(split.bos)


def _sentence_pieces(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, _Around]:
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
    return tokenizer, _Around(True)


def _unigram(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, _Around]:
    """Pieces of SentencePiece's unigram model: the pieces of a text have the largest sum of scores."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise _bad(file, f"{len(tokens)} tokens have {len(scores)} scores")
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    unknown = next((i for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, False))
    steps: list[Any] = []
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(n & 255 for n in charsmap)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    return tokenizer, _Around(False, True)


def _word_pieces(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, _Around]:
    """BERT's pieces of words. Files mark the first piece of a word, BERT the others. A vocabulary without capitals is
    of texts in lower case."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    special = {i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)}
    special |= {i for i, token in enumerate(tokens) if token.startswith("[") and token.endswith("]") and len(token) > 2}
    words = [
        token if i in special else token.removeprefix("▁") if token.startswith("▁") else f"##{token}"
        for i, token in enumerate(tokens)
    ]
    number = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = words[number] if isinstance(number, int) and number < len(words) else "[UNK]"
    ids = {word: i for i, word in enumerate(words)}
    if unknown not in ids:
        raise _bad(file, f"there is no token {unknown}")
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown, continuing_subword_prefix="##"))
    lower = not any(_LETTERS.search(word) for i, word in enumerate(words) if i not in special)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    return tokenizer, _Around(True, True, ("cls", "seperator"))


_MODELS: dict[str, Callable[[Mapping[str, Any], Path], tuple[Tokenizer, _Around]]] = {
    "gpt2": _byte_pairs,
    "llama": _sentence_pieces,
    "t5": _unigram,
    "bert": _word_pieces,
}


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any], around: _Around, file: Path) -> None:
    """Tokens that text is searched for before anything else, and those around a text, or around two of them."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    found: dict[str, tuple[str, int]] = {}
    for name, usual, key in zip(("bos", "eos"), (around.bos, around.eos), around.keys, strict=True):
        numbers = (metadata.get(f"tokenizer.ggml.{each}_token_id") for each in dict.fromkeys((key, name)))
        number = next((n for n in numbers if n is not None), None)
        said = metadata.get(f"tokenizer.ggml.add_{name}_token")
        there = number if isinstance(number, int) and number < len(tokens) else None
        if said and there is None:
            raise _bad(file, f"tokenizer.ggml.add_{name}_token is true, but {name}_token_id is {number!r:.80}")
        if there is not None and (usual if said is None else said):
            found[name] = tokens[there], there
    if found:
        first, last = ([found[name][0]] if name in found else [] for name in ("bos", "eos"))
        pair = [*first, "$A", *last, "$B:1", *(f"{token}:1" for token in last)] if around.keys[0] == "cls" else None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=pair or "$A:0 $B:1", special_tokens=list(dict.fromkeys(found.values()))
        )


def _bad(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file}: {why}; give --tokenizer FOLDER, that of the original model")
