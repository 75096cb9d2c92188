"""From tokens to text: what an output adds to its prompt, as a whole or as its tokens come, and the bytes of one token.

The text of an output is `decode(prompt + output)` after the text of the prompt. A character that is split over tokens
comes with its last token; where the prompt ends within one, it is the output's. What the output leaves unfinished is
U+FFFD, as the tokenizer decodes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_CONTEXT = 6  # prompt tokens that are decoded ahead: enough to know whether an output begins with a space
_LONGEST = 4  # bytes of a character, so no more tokens than that
_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_MOST_CONTEXT = 64  # tokens, where a prompt ends with a long row of bytes, or special ones stand within a character
Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """The text of one request as its tokens arrive.

    decode: the text of some tokens.
    rows: the decoder joins a row of bytes to characters; one broken character breaks the whole row.
    single: the known texts of single tokens; it may be shared.
    """

    def __init__(
        self, decode: Decode, prompt_ids: Sequence[int], rows: bool = False, single: dict[int, str] | None = None
    ) -> None:
        self._decode, self._rows, self._single = decode, rows, {} if single is None else single
        # The last tokens; _known is what of their text was given out, and the last _held ones may have more.
        self._ids, self._known = _context(decode, prompt_ids)
        self._held = 0

    def step(self, ids: Iterable[int]) -> str:
        """The text that these new tokens complete; "" when there is none yet."""
        return "".join(map(self._one, ids))

    def rest(self) -> str:
        """The text of tokens that wait for others, once no more come."""
        text = self._new(self._decode(self._ids)) if self._held else ""
        self._held = 0
        return text

    def _one(self, token: int) -> str:
        self._ids.append(token)
        self._held += 1
        text = self._decode(self._ids)
        if not text.endswith(_BROKEN):
            known = self._known[0]
            new = text[len(known) :] if text.startswith(known) else self._new(text)
            if self._held == 1:
                self._ids = [token]
                if (own := self._single.get(token)) is None:
                    own = self._single[token] = self._decode((token,))
                self._known = (own,)
            else:
                del self._ids[: len(self._ids) - self._held]
                self._known = (self._decode(self._ids),)
            self._held = 0
            return new
        if self._rows and self._held < _LONGEST:
            return ""
        new = self._new(text)[:-1]  # only what is last may still become a character
        if new or self._held == _MOST_CONTEXT:
            del self._ids[: len(self._ids) - _LONGEST]
            self._known, self._held = (self._decode(self._ids)[:-1],), min(self._held, _LONGEST - 1)
        return new

    def _new(self, text: str) -> str:
        """The part of ``text``, of all tokens here, after the text that was given out."""
        new = _rest_of(self._known, text)
        # Some decoders change text that was given out already when another token follows.
        return self._decode(self._ids[len(self._ids) - self._held :]) if new is None else new


def _rest_of(known: Sequence[str], whole: str) -> str | None:
    """The rest of ``whole`` after the first text that it begins with; None where it begins with none."""
    return next((whole[len(text) :] for text in known if whole.startswith(text)), None)


def new_text(decode: Decode, prompt_ids: Sequence[int], ids: Sequence[int], rows: bool) -> str:
    """What a detokenizer makes of all tokens of an output, at a seventh of the cost."""
    context, known = _context(decode, prompt_ids)
    whole = decode([*context, *ids])
    new = None if rows and _BROKEN in whole else _rest_of(known, whole)
    if new is None:
        detokenizer = Detokenizer(decode, prompt_ids, rows)
        new = detokenizer.step(ids) + detokenizer.rest()
    return new


def _context(decode: Decode, prompt_ids: Sequence[int]) -> tuple[list[int], Sequence[str]]:
    """The last tokens of a prompt, that do not begin within a character, and their text; then what it may be of whole
    characters, for an output that completes the last one."""
    count = _CONTEXT
    while True:
        context = list(prompt_ids[-count:])
        text = decode(context) if context else ""
        if not text.startswith(_BROKEN) or count >= min(len(prompt_ids), _MOST_CONTEXT):
            break
        count *= 2
    if not text.endswith(_BROKEN):
        return context, (text,)
    shorter = (decode(context[:-cut]) for cut in range(1, _LONGEST))  # a broken end may break all of a row of bytes
    whole = next((t for t in shorter if not t.endswith(_BROKEN)), "")
    return context, (text, *sorted((whole, text.rstrip(_BROKEN)), key=len, reverse=True))


def text_offsets(detokenizer: Detokenizer, ids: Sequence[int], text: str | None) -> list[int]:
    """The offset of each token in a text, in characters.

    detokenizer: a new one, that gives special tokens.
    text: None for the decoded tokens.

    A token without characters, such as BOS, has the offset of the next.
    """
    found, at = list[int](), 0
    for token in ids:
        found.append(at)
        piece = detokenizer.step((token,))
        at += len(piece) if text is None or text.startswith(piece, at) else 0
    return found


class TokenBytes:
    """The bytes that each token stands for in a text, by its id; none for one that is not there.

    The decoders of byte-level and byte-fallback BPE, of SentencePiece's models and of WordPiece are known; tokens of
    others are what their own text is.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._steps = _steps(backend)
        self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}

    def __getitem__(self, id: int) -> bytes:
        if (added := self._added.get(id)) is not None:
            return added.encode()
        piece = self._backend.id_to_token(id)
        return b"" if piece is None else self._of(piece)

    @property
    def by_bytes(self) -> bool:
        """Whether it joins tokens of one byte to characters, row by row."""
        return any(step["type"] == "ByteFallback" for step in self._steps)

    def _of(self, piece: str) -> bytes:
        for step in self._steps:
            match step:
                case {"type": "ByteLevel"}:
                    known = all(letter in self._letters for letter in piece)
                    return bytes(self._letters[letter] for letter in piece) if known else piece.encode()
                case {"type": "ByteFallback"}:
                    if found := _BYTE.fullmatch(piece):
                        return bytes.fromhex(found[1])
                case {"type": "Replace", "pattern": {"String": old}, "content": str(new)}:
                    piece = piece.replace(old, new)
                case {"type": "Metaspace", "replacement": str(mark)}:
                    piece = piece.replace(mark, " ")
                case {"type": "WordPiece", "prefix": str(prefix)}:
                    piece = piece[len(prefix) :] if piece.startswith(prefix) else f" {piece}"
                case {"type": "BPEDecoder", "suffix": str(suffix)}:
                    piece = f"{piece.removesuffix(suffix)} " if piece.endswith(suffix) else piece
        return piece.encode()

    @cached_property
    def _letters(self) -> dict[str, int]:
        """The byte that each letter of a byte-level vocabulary stands for: printable ones are themselves, and the
        others follow from U+0100 on."""
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(0x100) if byte not in shown]
        return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def _steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Of the decoder, as tokenizer.json has them."""
    if backend.decoder is None:
        return []
    found: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return found["decoders"] if found["type"] == "Sequence" else [found]
