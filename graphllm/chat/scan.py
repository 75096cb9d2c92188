"""Reads text that comes in pieces, tags and JSON in it, as if it were all there.

What must wait for more text is a generator that stops there and ends with its value: call it with ``yield from``. What
is decided never depends on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Literal, TypeVar

_T = TypeVar("_T")
Wait = Generator[None, None, _T]

SPACE = re.compile(r"\s+")
_SCALAR = re.compile(r"[-+.\w]+")
_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_LINES = re.compile(r'[^"\\]+')
_BRACKET, _QUOTE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_BETWEEN = re.compile(r'[^"{}\[\],:]+')
_HEX = "[0-9a-fA-F]"
_HALF = rf"\\u[dD][89abAB]{_HEX}{{2}}"
_CHARACTERS = re.compile(  # whole ones, of a string
    rf'(?:[^"\\]+|\\[^u]|{_HALF}\\u[dD][c-fC-F]{_HEX}{{2}}|\\u(?![dD][89abAB]){_HEX}{{4}})+', re.DOTALL
)
_PART_OF_ESCAPE = re.compile(rf"\\(?:u{_HEX}{{0,3}})?|{_HALF}(?:\\(?:u{_HEX}{{0,3}})?)?")
_HIGH_HALF, _LOW_HALF = re.compile(r"\\u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F]")  # of a character's two escapes


class TextSource:
    """Text as it comes, and how far it was read. ended: no more will come. cut: it would have gone on, so what may be
    the beginning of a tag is none, and no text either. starved: somebody has looked for more than there was.

    held: what was taken and may have to be given back as text. Who knows better clears it.
    """

    def __init__(self) -> None:
        self.ended = self.cut = self.starved = False
        self.held: list[str] = []
        self._text, self._at = "", 0

    def feed(self, text: str) -> None:
        # What is left is shorter than a tag: nobody waits with more in front of them.
        self._text, self._at = self._text[self._at :] + text, 0

    def more(self) -> Wait[bool]:
        """Whether the text goes on."""
        while self._at == len(self._text) and not self.ended:
            yield
        self.starved |= self._at == len(self._text)
        return self._at < len(self._text)

    def ahead(self, count: int = 1) -> Wait[str]:
        """The next characters, which stay; fewer at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        self.starved |= len(self._text) - self._at < count
        return self._text[self._at : self._at + count]

    def rest(self) -> str:
        """Take what is here, without holding it."""
        piece, self._at = self._text[self._at :], len(self._text)
        return piece

    def until(self, tag: str, pass_on: Callable[[str], None]) -> Wait[bool]:
        """Pass text on up to a tag, and take that; held then: whitespace before it, and the tag. False: there is none.

        pass_on: gets text that does not end in whitespace, and what is held belongs before it.
        """
        while (yield from self.more()):
            if (yield from self.tag(tag)):
                return True
            end = self._text.find(tag[0], self._at + 1)
            piece, self._at = self._text[self._at : None if end < 0 else end], len(self._text) if end < 0 else end
            if body := piece.rstrip():
                pass_on(body)
            self.held.append(piece[len(body) :])
        return False

    def tag(self, tag: str) -> Wait[bool]:
        """Take this if it comes next; waits no longer than it takes to know."""
        while True:
            here = self._text[self._at : self._at + len(tag)]
            if here == tag:
                self._take(len(tag))
                return True
            if not tag.startswith(here):
                return False
            if self.ended:
                self.starved = True
                if self.cut and here:
                    self.held.clear()
                    self._at = len(self._text)
                return False
            yield

    def run(self, characters: re.Pattern[str]) -> Wait[str]:
        """Take as many characters as match; perhaps none."""
        pieces: list[str] = []
        while (yield from self.more()) and (piece := self._stretch(characters)):
            pieces.append(piece)
        return "".join(pieces)

    def symbol(self, symbol: str) -> Wait[bool]:
        """Take whitespace, and the symbol if it comes then."""
        yield from self.run(SPACE)
        return (yield from self.tag(symbol))

    def string(self) -> Wait[str | None]:
        """Take a JSON string; None when there is none."""
        if not (yield from self.symbol('"')):
            return None
        pieces: list[str] = []
        while True:
            pieces.append((yield from self.run(_STRING)))
            if (yield from self.ahead()) != "\\":
                break
            pieces.append(self._take(len((yield from self.ahead(2)))))
        return _decoded("".join(pieces)) if (yield from self.tag('"')) else None

    def skip(self) -> Wait[bool]:
        """Take any JSON value; False when there is none."""
        yield from self.run(SPACE)
        first = yield from self.ahead()
        if first == '"':
            return (yield from self.string()) is not None
        if first in ("{", "["):
            yield from self.nested(lambda piece: None)
            return True
        return (yield from self.run(_SCALAR)) != ""

    def nested(self, pass_on: Callable[[str], None]) -> Wait[None]:
        """Take an object or an array, up to its last bracket, and pass it on."""
        brackets = _Brackets()
        while not brackets.closed and (yield from self.more()):
            pass_on(self._take(brackets.end(self._text, self._at) - self._at))

    def quoted_object(self, pass_on: Callable[[str], None]) -> Wait[bool]:
        """Take a JSON string, and pass on the object that it holds (empty for nothing); False when it holds none."""
        yield from self.symbol('"')
        begun = False
        while (yield from self.more()):
            if (yield from self.tag('"')):
                if not begun:
                    pass_on("{}")
                return True
            escaped = (yield from self.ahead()) == "\\"
            piece = (yield from self._escape()) if escaped else self._stretch(_LINES)
            piece = piece if begun else piece.lstrip()
            if not begun and piece and piece[0] != "{":
                return False
            if piece:
                begun = True
                pass_on(piece)
        return begun

    def _escape(self) -> Wait[str]:
        """The character that an escape stands for, which may take two; nothing for one that breaks off."""
        raw = yield from self.ahead(2)
        if raw == "\\u":
            raw = yield from self.ahead(6)
            if _HIGH_HALF.match(raw):
                both = yield from self.ahead(12)
                broken = len(both) < 12 and _PART_OF_ESCAPE.fullmatch(both)
                raw = both if broken or _LOW_HALF.match(both, 6) else raw
        self._take(len(raw))
        if self.starved and _PART_OF_ESCAPE.fullmatch(raw):
            return ""
        decoded = _decoded(raw)
        return raw if decoded is None else decoded

    def _stretch(self, characters: re.Pattern[str]) -> str:
        """Take as many of the characters that are here as match."""
        found = characters.match(self._text, self._at)
        return self._take(found.end() - self._at) if found else ""

    def _take(self, count: int) -> str:
        piece = self._text[self._at : self._at + count]
        self._at += count
        self.held.append(piece)
        return piece


class _Brackets:
    """Finds the end of a JSON value that begins with a bracket. closed: it is found."""

    def __init__(self) -> None:
        self.closed = False
        self._depth, self._string, self._escape = 0, False, False

    def end(self, text: str, at: int) -> int:
        """Where it ends in its next piece, from ``at`` on; the piece's length when it goes on."""
        while at < len(text) and not self.closed:
            if self._escape:
                at, self._escape = at + 1, False
                continue
            found = (_QUOTE if self._string else _BRACKET).search(text, at)
            if not found:
                return len(text)
            at, mark = found.end(), found[0]
            if mark == '"':
                self._string = not self._string
            elif mark == "\\":
                self._escape = True
            else:
                self._depth += 1 if mark in "{[" else -1
                self.closed = self._depth == 0
        return at


class OpenJson:
    """A JSON object as it comes, given out so that it can be closed wherever it breaks off: a name and what stands
    around it wait for its value, a number for its end, an escape for its last digit."""

    def __init__(self) -> None:
        self._brackets: list[str] = []  # that are to come
        self._string: Literal["", "name", "value"] = ""  # the string that the text ends in
        self._named = False  # the next string is a name
        self._begun = self._closed = False
        self._held: list[str] = []
        self._escape = ""  # the beginning of one

    def feed(self, text: str) -> str:
        """What can be shown of the object, with this piece of it."""
        text, self._escape = self._escape + text, ""
        shown: list[str] = []
        at = 0
        while at < len(text) and not self._closed:
            found = (_CHARACTERS if self._string else _BETWEEN).match(text, at)
            piece = found[0] if found else text[at : at + 2] if text[at] == "\\" else text[at]
            if piece[0] == "\\" and not found and _PART_OF_ESCAPE.fullmatch(text, at):
                self._escape = text[at:]
                break
            at += len(piece)
            if piece == "," and not self._string:
                shown += self._held
                self._held = []
            self._held.append(piece)
            if self._is_shown(piece):
                shown += self._held
                self._held = []
        return "".join([*shown, text[at:] if self._closed else ""])

    def _is_shown(self, piece: str) -> bool:
        """Take a string's characters, a mark, or what stands between marks; whether all so far can be closed."""
        if self._string:
            value = self._string == "value"
            if piece == '"':
                self._string = ""
            return value
        match piece:
            case '"':
                self._string = "name" if self._named else "value"
                return not self._named
            case "{" | "[":
                self._brackets.append("}" if piece == "{" else "]")
                self._named, self._begun = piece == "{", True
                return True
            case "}" | "]":
                del self._brackets[-1:]
                self._named, self._closed = False, not self._brackets
                return True
            case ",":
                self._named = self._brackets[-1:] == ["}"]
            case ":":
                self._named = False
        return False

    def close(self) -> str:
        """The end of the object, which has none of its own; what was not shown is left out."""
        if self._closed:
            return ""
        self._closed = True
        quote = '"' if self._string == "value" else ""
        return quote + "".join(reversed(self._brackets)) if self._begun else "{}"


def _decoded(raw: str) -> str | None:
    """What stands between the quotes of a JSON string means; None when that is no JSON."""
    try:
        text = json.loads(f'"{raw}"')
    except ValueError:
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a character cannot be sent
