"""What a model's text means in a chat: reasoning, an answer, tool calls. Read as it comes, in pieces of any size."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from graphllm.chat.scan import SPACE, OpenJson, TextSource, Wait


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. index: 0 for the first one of this reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON that a tool call passes."""

    index: int
    text: str


Part = Reasoning | Text | CallStart | CallArguments


class Usage(NamedTuple):
    """Tokens. cached: of the prompt, found in the prefix cache. reasoning: of the completion."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0


class Ending(NamedTuple):
    """finish_reason: "stop", "length", "repetition", "tool_calls", "half_call" (what ended it stands within a call),
    "abort" or "error". stop_reason: the stop string or token id that ended it. error: what went wrong, for people."""

    finish_reason: str
    usage: Usage
    stop_reason: int | str | None = None
    error: str | None = None


class FunctionCall(NamedTuple):
    """A whole tool call. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class ChatReply(NamedTuple):
    """A whole reply."""

    reasoning: str
    text: str
    calls: list[FunctionCall]


def merged(parts: Iterable[Part]) -> ChatReply:
    """The reply that these parts make up."""
    parts = list(parts)

    def text(kind: type[Reasoning] | type[Text]) -> str:
        return "".join(p.text for p in parts if isinstance(p, kind))

    starts = {p.index: p for p in parts if isinstance(p, CallStart)}
    arguments: dict[int, list[str]] = {index: [] for index in starts}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    calls = [FunctionCall(start.id, start.name, "".join(arguments[index])) for index, start in starts.items()]
    return ChatReply(text(Reasoning), text(Text), calls)


class ReplyFormat(NamedTuple):
    """How a model's text is to be read.

    reasoning: it may begin with ``<think>...</think>``. thinking: the prompt ended inside such a tag, so the text
    begins with reasoning. tools: how calls are written, None when there are none. "hermes", "llama3" and "mistral" are
    models' own ways; "json" is an array ``[{"name": ..., "parameters": {...}}, ...]``; "named": the whole text is the
    arguments of the function ``name``. names: the functions there are. Another one is called too if that can be a name,
    but not by an object without a tag around it (llama3). single: the reply ends with its first call.
    """

    reasoning: bool = False
    thinking: bool = False
    tools: str | None = None
    name: str = ""
    names: frozenset[str] = frozenset()
    single: bool = False


FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
ARGUMENTS = ("arguments", "parameters")  # names that models give the arguments of a call
_OTHER = ("type", "id")  # further fields that a call may have
_CLOSERS, _SEPARATORS, _NAME = re.compile(r"[\s\]}]+"), re.compile(r"[\s;]+"), re.compile(r"[\w.-]+")
_TRAILING = string.whitespace + ",;]}"  # of no meaning after a call


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ReplyReader:
    """Reads one reply. called: a tool has been called. broken: the text ended within the last call. reasoning: the text
    is inside the reasoning now. done: the only call of a single one is complete, and nothing that comes is read.

    The result does not depend on how the text was cut into pieces, and takes a time in proportion to its length. Text
    is held back while it may be the start of a tag, whitespace before a tag, or a call before its arguments. A call
    that turns out to be none is text, as it stands. With the beginning of its arguments it is a call, and all that does
    not belong to it is text after it. Where the text breaks off, its arguments are closed.
    """

    def __init__(self, format: ReplyFormat, new_id: Callable[[], str] = _call_id) -> None:
        """new_id: makes the id of a call."""
        self.called = self.broken = self.done = False
        self.reasoning = format.thinking
        self._format, self._new_id = format, new_id
        self._source = TextSource()
        self._parts: list[Part] = []  # not given out yet
        self._calls = 0
        self._shown = OpenJson()  # arguments of the last one
        self._after_call = False  # without text since
        self._work = self._read()

    def feed(self, text: str) -> list[Part]:
        """What this piece of the text adds to the reply."""
        self._source.feed(text)
        return self._advance()

    def finish(self, cut: bool = False) -> list[Part]:
        """What was held back; the text has ended. cut: not where the model ended it, so what may be the beginning of a
        tag or a call is left out."""
        self._source.ended, self._source.cut = True, cut
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._work, None)
        parts, self._parts = self._parts, []
        return list(_joined(parts))

    def _read(self) -> Wait[None]:
        if self._format.reasoning or self._format.thinking:
            yield from self._think()
        ways = {
            None: self._plain,
            "hermes": self._hermes,
            "llama3": self._llama3,
            "mistral": self._mistral,
            "json": self._json,
            "named": self._named,
        }
        yield from ways[self._format.tools]()
        self._settle()
        self.broken = self._close_call()

    def _think(self) -> Wait[None]:
        source = self._source
        yield from source.run(SPACE)
        opened = yield from source.tag("<think>")
        if not (opened or self._format.thinking):
            return
        self.reasoning = True
        yield from source.run(SPACE)
        source.held.clear()
        if (yield from source.until("</think>", self._reasoning)):
            self.reasoning = False
            yield from source.run(SPACE)
            source.held.clear()
        else:
            self._reasoning()

    def _plain(self) -> Wait[None]:
        while (yield from self._source.more()):
            self._text(self._source.rest())

    def _named(self) -> Wait[None]:
        yield from self._source.run(SPACE)
        while (yield from self._source.more()):
            self._argue(0, self._format.name, self._source.rest())
        self._no_call()

    def _json(self) -> Wait[None]:
        yield from self._array()
        yield from self._source.run(SPACE)
        yield from self._plain()

    def _hermes(self) -> Wait[None]:
        source = self._source
        while (yield from source.until("<tool_call>", self._text)):
            if (yield from self._object()):
                if (yield from self._end_if_single()):
                    return
                yield from source.run(_CLOSERS)  # too many of them are a common mistake
                if (yield from source.tag("</tool_call>")):
                    source.held.clear()
            else:
                self._no_call()

    def _mistral(self) -> Wait[None]:
        source = self._source
        while (yield from source.until("[TOOL_CALLS]", self._text)):
            yield from source.run(SPACE)
            if (yield from source.ahead()) in ("[", "{"):
                yield from self._array()
            elif not (yield from self._prefixed()):
                self._no_call()
            yield from self._end_if_single()

    def _llama3(self) -> Wait[None]:
        source = self._source
        yield from source.run(SPACE)
        if (yield from source.ahead()) == "{":
            yield from self._sequence(bare=True)
        while (yield from source.until("<|python_tag|>", self._text)):
            yield from self._sequence(bare=False)

    def _sequence(self, bare: bool) -> Wait[None]:
        """Calls one after another. bare: without a tag before them."""
        while (yield from self._object(bare)):
            if (yield from self._end_if_single()):
                return
            yield from self._source.run(_SEPARATORS)
            if (yield from self._source.ahead()) != "{":
                return
        self._no_call()

    def _array(self) -> Wait[None]:
        """Calls in a JSON array, or one call without an array."""
        yield from self._source.symbol("[")
        while (yield from self._object()):
            if (yield from self._end_if_single()):
                return
            if not (yield from self._source.symbol(",")):
                if (yield from self._source.symbol("]")):
                    self._source.held.clear()
                return
        self._no_call()

    def _prefixed(self) -> Wait[bool]:
        """A call with its name before the arguments; False, and held, when it is none."""
        source = self._source
        name = yield from source.run(_NAME)
        if (yield from source.tag("[CALL_ID]")):
            yield from source.run(_NAME)
        yield from source.tag("[ARGS]")
        yield from source.run(SPACE)
        if not FUNCTION_NAME.fullmatch(name) or (yield from source.ahead()) != "{":
            return False
        yield from source.nested(partial(self._argue, self._calls, name))
        return True

    def _object(self, bare: bool = False) -> Wait[bool]:
        """A call as a JSON object; False, and held, when it is none.

        bare: without a tag, so that it is one only if its function is known and it has nothing that a call has not.
        """
        source, index, name = self._source, self._calls, ""
        early: list[str] = []  # arguments that stand before the name
        separator = "{"
        while (yield from source.symbol(separator)):
            separator = ","
            key = yield from source.string()
            if key is None or not (yield from source.symbol(":")):
                return self._calls > index
            if key == "name" and not name:
                name = (yield from source.string()) or ""
                if not FUNCTION_NAME.fullmatch(name) or (bare and name not in self._format.names):
                    return False
                if early:
                    self._argue(index, name, "".join(early))
            elif key in ARGUMENTS and not early and self._calls == index:
                if not (yield from self._arguments(partial(self._argue, index, name) if name else early.append)):
                    return False
                if self._calls > index:
                    source.held.clear()
            elif bare and key not in _OTHER and self._calls == index:
                return False
            elif not (yield from source.skip()):
                return self._calls > index
        if (yield from source.symbol("}")) and name:
            if self._calls == index:
                self._argue(index, name, "{}")
            source.held.clear()
        return self._calls > index

    def _arguments(self, pass_on: Callable[[str], None]) -> Wait[bool]:
        """Of a call: an object, a string that holds one, or null for an empty one; False when it is something else."""
        source = self._source
        yield from source.run(SPACE)
        first = yield from source.ahead()
        if first == '"':
            return (yield from source.quoted_object(pass_on))
        if first == "{":
            yield from source.nested(pass_on)
        elif (yield from source.tag("null")):
            pass_on("{}")
        else:
            return False
        return True

    def _end_if_single(self) -> Wait[bool]:
        """After a call: read no further if it is the only one; whether it is."""
        self.done = self._format.single and self._calls > 0
        while self.done and (yield from self._source.more()):
            self._source.rest()
        if self.done:
            self._source.held.clear()
        return self.done

    def _no_call(self) -> None:
        """Give out what is held as text: it is no call, or its beginning, which is nothing."""
        if self._source.cut and self._source.starved:
            self._source.held.clear()
        self._settle()

    def _settle(self) -> None:
        """Give out what is held as text, unless it has no meaning where it stands."""
        if self._after_call and self._source.cut and self._source.starved:
            self._source.held.clear()
        if not self._after_call or "".join(self._source.held).strip(_TRAILING):
            self._text()

    def _text(self, text: str = "") -> None:
        """Give out what is held, and this, as text."""
        if text := self._held() + text:
            self._close_call()
            self._parts.append(Text(text))
            self._after_call = False

    def _reasoning(self, text: str = "") -> None:
        """Give out what is held, and this, as reasoning."""
        if text := self._held() + text:
            self._parts.append(Reasoning(text))

    def _argue(self, index: int, name: str, piece: str) -> None:
        """Give out a piece of a call's arguments. The first one opens the call: what was held until then is its."""
        if index == self._calls:
            self._close_call()
            self._parts.append(CallStart(index, self._new_id(), name))
            self._calls += 1
            self._shown = OpenJson()
        self.called = self._after_call = True
        if shown := self._shown.feed(piece):
            self._parts.append(CallArguments(index, shown))
        self._source.held.clear()

    def _close_call(self) -> bool:
        """Give out the end of the last call's arguments, if they have none; whether that was so."""
        end = self._shown.close() if self._calls else ""
        if end:
            self._parts.append(CallArguments(self._calls - 1, end))
        return end != ""

    def _held(self) -> str:
        held = "".join(self._source.held)
        self._source.held.clear()
        return held


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbours of a kind as one."""
    for _, run in groupby(parts, lambda p: (type(p), p.index if isinstance(p, CallStart | CallArguments) else 0)):
        first, *more = run
        if more and not isinstance(first, CallStart):
            yield replace(first, text=first.text + "".join(p.text for p in more if not isinstance(p, CallStart)))
        else:
            yield first
