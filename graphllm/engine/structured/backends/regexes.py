r"""Regular expressions that every library reads alike: rewritten into literals, classes, groups and repetitions.

`\d` and `\w` are ASCII, as in JSON Schema's dialect. What is left has one meaning, that of the whole text matching;
anything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from graphllm.config import ConfigError
from graphllm.engine.structured.source import UnsupportedError

_MAX_TEXT, _MAX_REPEATS = 20_000, 5000
_MAX_NESTED = 10_000  # of one part, where repetitions stand in repetitions
Ranges = list[tuple[str, str]]  # of characters, both ends among them
_CLASSES: Mapping[str, Ranges] = {
    "d": [("0", "9")],
    "w": [("0", "9"), ("A", "Z"), ("a", "z"), ("_", "_")],
    "s": [(" ", " "), ("\t", "\r")],
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_REPEAT = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
# Of no backend: look-around, references to groups, possessive repetitions.
_NEVER = re.compile(r"\(\?(<?[=!]|>)|\\[bBAZ1-9]|the possessive")
# What a JSON string cannot hold as it stands.
_UNQUOTABLE: Ranges = [('"', '"'), ("\\", "\\"), ("\x00", "\x1f")]
_WRITTEN = {"\n": r"\n", "\r": r"\r", "\x00": r"\x00"}


def plain_regex(pattern: str, field: str, where: str = "") -> str:
    """The same expression in plain form, of the whole text. where: in a schema. Raises UnsupportedError."""
    return _Reader(pattern, field, where, quoted=False).read()


def plain_string_pattern(pattern: str, field: str, where: str) -> str:
    """A pattern of JSON strings, without quotes and escapes, that match a schema's pattern. Raises ConfigError,
    UnsupportedError."""
    if not (pattern.startswith("^") and re.search(r"(?<!\\)(\\\\)*\$$", pattern)):
        raise UnsupportedError(field, "pattern", where, "string", f"{pattern!r:.60} is not from ^ to $")
    return _Reader(pattern, field, where, quoted=True).read()


def literal(text: str) -> str:
    """An expression of just this text."""
    return "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    return "\\" + char if char in r"\.^$*+?()[]{}|-" else _WRITTEN.get(char, char)


def _class(ranges: Iterable[tuple[str, str]], negated: bool = False) -> str:
    """A character class in an order that XGrammar reads correctly: it takes a first \\^ for a negation, and hexadecimal
    digits after \\x00 and its range for more digits."""
    ranges = sorted(set(ranges), reverse=True)
    low, high = ranges[0]
    if low == "^" and not negated:
        others = [("_", high)] * (high > low) + ranges[1:]
        if not others:
            return r"\^"
        ranges = [others[0], ("^", "^"), *others[1:]]
    parts = (_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges)
    return f"[{'^' * negated}{''.join(parts)}]"


class _Reader:
    """Reads one expression. quoted: what it matches stands inside a JSON string."""

    def __init__(self, pattern: str, field: str, where: str, quoted: bool) -> None:
        self._field, self._where, self._quoted = field, where, quoted
        if len(pattern) > _MAX_TEXT:
            raise self._wrong(f"{len(pattern)} characters, more than {_MAX_TEXT}")
        try:
            pattern.encode()
        except UnicodeEncodeError as e:
            raise self._wrong("has half a character") from e
        begin, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
        self._text = pattern[begin : len(pattern) - end]
        self._at = 0
        self._repeats = 0

    def read(self) -> str:
        """The plain form of it all."""
        parts: list[str] = []
        depth, atom = 0, False  # whether there is something to repeat
        most = [1]  # how often a part of each group that is open is repeated in it
        closed = 1  # the same of the group that was closed last
        while self._at < len(self._text):
            c = self._text[self._at]
            repeat = _REPEAT.match(self._text, self._at)
            if repeat:
                if not atom:
                    raise self._wrong("a repetition of nothing")
                parts.append(self._repetition(repeat))
                most[-1] = max(most[-1], closed * int(repeat[3] or repeat[1] or 1))
                if most[-1] > _MAX_NESTED:
                    raise self._wrong(f"more than {_MAX_NESTED} repetitions within repetitions")
                atom = False
                continue
            self._at += 1
            closed = 1
            atom = c not in "(|"
            if c == "(":
                group = _GROUP.match(self._text, self._at)
                if self._text.startswith("?", self._at) and group is None:
                    raise self._unsupported(self._text[self._at - 1 : self._at + 3])
                self._at = group.end() if group else self._at
                depth += 1
                most.append(1)
                parts.append("(?:")
            elif c == ")":
                depth -= 1
                if depth < 0:
                    raise self._wrong("')' without '('")
                closed = most.pop()
                most[-1] = max(most[-1], closed)
                parts.append(c)
            elif c == "|":
                if not depth and self._quoted:
                    raise self._unsupported("| outside of (...)")
                parts.append(c)
            elif c in "^$":
                raise self._unsupported(f"{c} inside of it")
            elif c == ".":
                parts.append(self._class([("\n", "\n")], negated=True))
            elif c == "[":
                parts.append(self._bracket())
            elif c == "\\":
                parts.append(self._escape())
            elif c in "{}":
                raise self._wrong(f"{c!r} without a backslash")
            else:
                parts.append(self._literal(c))
        if depth:
            raise self._wrong("'(' without ')'")
        return "".join(parts)

    def _repetition(self, found: re.Match[str]) -> str:
        self._at = found.end()
        most = int(found[3] or found[1] or 1)
        if found[3] and int(found[3]) < int(found[1]):
            raise self._wrong(f"{found[0]} ends before it begins")
        self._repeats += most
        if self._repeats > _MAX_REPEATS:
            raise self._wrong(f"more than {_MAX_REPEATS} repetitions")
        after = self._text[self._at : self._at + 1]
        if after == "?":  # asks for the shortest match first: the same texts
            self._at += 1
        elif after == "+":
            raise self._unsupported(f"the possessive {found[0]}+")
        if _REPEAT.match(self._text, self._at):
            raise self._wrong("a repetition of a repetition")
        return found[0]

    def _escape(self) -> str:
        c = self._next()
        if c.lower() in _CLASSES:
            return self._class(_CLASSES[c.lower()], negated=c.isupper())
        return self._literal(self._character(c))

    def _bracket(self) -> str:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: Ranges = []
        first = True
        while (c := self._next()) != "]" or first:
            first = False
            if c == "[" or (c in "&~-" and self._text.startswith(c, self._at)):
                raise self._unsupported(f"{c!r} without a backslash in [...]")
            if c == "\\" and (kind := self._text[self._at : self._at + 1]) in _CLASSES:
                self._at += 1
                ranges += _CLASSES[kind]
                continue
            low = high = self._member(c)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._member(self._next())
                if high < low:
                    raise self._wrong(f"{low}-{high} ends before it begins")
            ranges.append((low, high))
        return self._class(ranges, negated)

    def _member(self, c: str) -> str:
        return self._character(self._next()) if c == "\\" else c

    def _class(self, ranges: Ranges, negated: bool) -> str:
        if self._quoted and negated:
            ranges = [*ranges, *_UNQUOTABLE]
        elif self._quoted:
            for low, high in ranges:
                self._check_quotable(low, high)
        return _class(ranges, negated)

    def _check_quotable(self, low: str, high: str) -> None:
        if self._quoted and any(low <= last and first <= high for first, last in _UNQUOTABLE):
            raise self._unsupported(f"{low!r}, which JSON escapes,")

    def _character(self, c: str) -> str:
        """What an escape that is no class stands for."""
        if c in _CONTROLS:
            return _CONTROLS[c]
        if code := _CODE.match(self._text, self._at - 1):
            self._at = code.end()
            char = chr(int(code[1] or code[2], 16))
            if "\ud800" <= char <= "\udfff":
                raise self._wrong(f"\\{code[0]} is half a character")
            return char
        if c.isalnum():
            raise self._unsupported(f"\\{c}")
        return c

    def _literal(self, c: str) -> str:
        if c == "\x00":
            raise self._wrong("a null character")
        self._check_quotable(c, c)
        return _escaped(c)

    def _next(self) -> str:
        if self._at == len(self._text):
            raise self._wrong("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _wrong(self, problem: str) -> ConfigError:
        place = f"{self._where}: pattern: " if self._where else ""
        return ConfigError(f"structured_outputs.{self._field}: {place}{problem}; change it")

    def _unsupported(self, what: str) -> UnsupportedError:
        never = "never" if _NEVER.match(what) else ""
        return UnsupportedError(self._field, f"pattern: {what}" if self._where else what, self._where, never)
