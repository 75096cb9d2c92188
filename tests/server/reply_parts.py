"""For the tests of APIs: random replies, as a reader gives them, and what they amount to; requests with a mistake; a
server that plays a stream to an API's own client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx2
from hypothesis import strategies as st

from graphllm.chat.replies import CallArguments, CallStart, Ending, Part, Reasoning, Text, Usage

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps)
BROKEN = st.tuples(ARGUMENTS, st.integers(1, 30)).map(lambda cut: cut[0][: -cut[1]]) | TEXTS
USAGES = st.builds(
    lambda cached, new, reasoning, rest: Usage(cached + new, reasoning + rest, cached, reasoning),
    *[st.integers(0, 1000)] * 4,
)
ENDINGS = st.one_of(
    st.builds(Ending, st.just("length"), USAGES),
    st.builds(Ending, st.just("stop"), USAGES, st.none() | st.integers(0, 9) | st.text("ab", min_size=1)),
)


@st.composite
def replies(draw: st.DrawFn, arguments: st.SearchStrategy[str] = ARGUMENTS) -> list[Part]:
    """Reasoning, texts and calls in any order, in pieces; a call's pieces come in a row."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(("reasoning", "text", "call")), max_size=5)):
        if kind == "call":
            parts.append(CallStart(calls, f"call_{calls:024x}", draw(st.sampled_from(("f", "get_weather")))))
            parts += [CallArguments(calls, piece) for piece in _pieces(draw, draw(arguments))]
            calls += 1
        else:
            make = Reasoning if kind == "reasoning" else Text
            parts += [make(piece) for piece in _pieces(draw, draw(TEXTS))]
    return parts


def _pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def spoiled(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """A body in which something, at any depth, is something else."""
    root = json.loads(json.dumps({"": body}))
    within, key = root, ""
    while isinstance(within[key], (dict, list)) and within[key] and (within is root or draw(st.booleans())):
        within = within[key]
        key = draw(st.sampled_from(sorted(within) if isinstance(within, dict) else range(len(within))))
    within[key] = draw(VALUES)
    return root[""]


def batches(parts: list[Part], size: int) -> Iterable[list[Part]]:
    """The parts as a stream gives them, so many at once."""
    return (parts[i : i + size] for i in range(0, len(parts), size))


def blocks(parts: Iterable[Part]) -> list[tuple[str, ...]]:
    """What a reader sees: ("reasoning" | "text", its text) or ("call", id, name, arguments), neighbours of a kind as
    one."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case CallStart(_, id, name):
                found.append(("call", id, name, ""))
            case CallArguments(_, text):
                found[-1] = (*found[-1][:3], found[-1][3] + text)
            case Text(text) | Reasoning(text) if text:
                kind = "text" if isinstance(part, Text) else "reasoning"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                else:
                    found.append((kind, text))
    return found


class Replay(httpx2.BaseTransport):
    """For a client's HTTP: whatever it asks for, the answer is the stream of these events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        data = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in self.events)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data.encode())


def unknown(model: Any) -> dict[str, Any]:
    """Fields of an object of a client, or of one in it, that its type does not have."""
    found = dict(model.model_extra or {})
    for value in vars(model).values():
        for inner in value if isinstance(value, list) else [value]:
            if hasattr(inner, "model_extra"):
                found |= unknown(inner)
    return found
