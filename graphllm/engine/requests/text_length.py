"""Texts with far more tokens than there is room for, refused before they are tokenized as a whole: that takes 0.3 s and
100 MB for each megabyte, and nothing can stop it on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from graphllm.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

PIECE = 64 << 10  # characters that are tokenized at once to count them: about 20 ms
_USUAL = 8  # characters of a token; texts that may fit by this are not counted first
_SEAM = 64  # tokens that a text may have more for being cut at one place, far more than it ever has
# Where a token can stand for any number of characters: characters allowed for each token, and a million in any case.
_UNBOUNDED, _ALWAYS = 64, 1 << 20


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    @property
    def characters_per_token(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def encode_at_most(
    tokenizer: Encoder, text: str, limit: int, add_special_tokens: bool = True
) -> Iterator[list[int] | None]:
    """None after each piece that was counted, then the token ids. Raises ConfigError for what is far over ``limit``
    tokens; what has a few more is left to the caller, and what has no more is never refused, but for what is longer
    than `_UNBOUNDED` says where the tokenizer has no bound (`characters_per_token`)."""
    length = len(text)
    if length > _USUAL * limit:
        bound = tokenizer.characters_per_token
        most = max(_UNBOUNDED * limit, _ALWAYS) if bound is None else bound * limit
        if length > most:
            least = "" if bound is None else f", which are at least {-(-length // bound)} tokens"
            raise _too_long(length, least, limit)
        count, begin = 0, 0
        while begin < length:
            end = _cut(text, begin)
            # Without a bound the spaces at the seam may belong to a token of another piece.
            piece = text[begin:end].strip() if bound is None else text[begin:end]
            count += len(tokenizer.encode(piece, add_special_tokens=False)) - (_SEAM if begin else 0)
            if count > limit:
                raise _too_long(length, f"; the first {end} are more than {count} tokens", limit)
            begin = end
            yield None
    yield tokenizer.encode(text, add_special_tokens)


def _too_long(length: int, known: str, limit: int) -> ConfigError:
    return ConfigError(
        f"prompt has {length} characters{known}: there is room for {limit} tokens; shorten it, or compile with a "
        "larger --max-model-len"
    )


def _cut(text: str, begin: int) -> int:
    """The end of the piece that begins here: before a space, where there is one."""
    end = begin + PIECE
    if end >= len(text):
        return len(text)
    space = max(text.rfind(" ", begin + PIECE // 2, end), text.rfind("\n", begin + PIECE // 2, end))
    return space if space > 0 else end


def characters_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """How many characters of a text one token stands for at most; None where there is no such number: unknown words
    become one token or none, or spaces, accents and the like are taken away, as many as there are."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    model = backend.model
    parts = _flat(backend.pre_tokenizer, "pretokenizers")
    bytelevel = any(p["type"] == "ByteLevel" for p in [*parts, *_flat(backend.normalizer, "normalizers")])
    if bytelevel:
        from tokenizers.pre_tokenizers import ByteLevel

        all_known = all(letter in vocabulary for letter in ByteLevel.alphabet())
    else:
        all_known = getattr(model, "byte_fallback", False) and all(f"<0x{i:02X}>" in vocabulary for i in range(256))
    if type(model).__name__ != "BPE" or not all_known or not all(map(_keeps, parts)):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # with all adjacent spaces
        return None
    shrink = 1
    for part in _flat(backend.normalizer, "normalizers"):
        if (factor := _shrinks(part)) is None:
            return None
        shrink *= factor
    normalizer = backend.normalizer
    written = [normalizer.normalize_str(t.content) for t in added if t.normalized] if normalizer is not None else []
    return shrink * max(map(len, [*vocabulary, *written]))


def _flat(component: Any, inner: str) -> list[dict[str, Any]]:
    """The settings of a component of a tokenizer; a sequence gives the settings of each member."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [s for part in state[inner] for s in flat(part)] if state["type"] == "Sequence" else [state]

    return [] if component is None else flat(json.loads(component.__getstate__()))


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves nothing out."""
    if part["type"] in ("Split", "Punctuation"):
        return part["behavior"] != "Removed"
    return part["type"] in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def _shrinks(part: dict[str, Any]) -> int | None:
    """How many times fewer characters a normalizer may leave, None where there is no end to it."""
    match part["type"]:
        case "NFC" | "NFKC":
            return 4  # the most that make up one: U+1F82, for example
        case "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel":
            return 1
        case "Replace" if part["content"] and "String" in part["pattern"]:
            return -(-len(part["pattern"]["String"]) // len(part["content"]))
    return None
