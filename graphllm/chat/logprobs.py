"""Log-probabilities of a chat's tokens, as OpenAI's APIs give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphllm.chat.call import Call
from graphllm.engine.requests.outputs import CompletionOutput, Logprob, Position

LOWEST = -9999.0  # stands for the logarithm of 0, which JSON has not


def named(call: Call, positions: list[Position] | None) -> list[Position] | None:
    """Log-probabilities with tokens as their ids, where that was asked for."""
    if positions is None or not call.tokens_as_ids:
        return positions
    return [{i: e._replace(decoded_token=f"token_id:{i}") for i, e in position.items()} for position in positions]


def of_completion(call: Call, completion: CompletionOutput) -> list[dict[str, Any]] | None:
    """An entry for each token, None where none were asked for."""
    positions = named(call, completion.logprobs)
    if positions is None:
        return None
    return entries(positions, call.params.logprobs or 0, frozenset(call.params.logprob_token_ids or ()))


def entries(positions: Iterable[Position], top: int, named: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
    """Log-probabilities in a chat's form. top: the likeliest tokens listed for each, -1 for all. named: tokens that are
    listed, too."""
    found = []
    for position in positions:
        # The token that was taken stands first, wherever it ranks.
        likeliest = sorted(position.values(), key=lambda entry: entry.rank or 0)
        listed = likeliest if top < 0 else [e for e in likeliest if (e.rank or 0) <= top][:top]
        listed = listed + [e for i, e in position.items() if i in named and e not in listed]
        taken = next(iter(position.values()))
        found.append({**_token(taken), "top_logprobs": [_token(entry) for entry in listed]})
    return found


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    said = text.encode() if entry.token_bytes is None else entry.token_bytes
    return {"token": text, "logprob": max(entry.logprob, LOWEST), "bytes": list(said)}


class TextLogprobs:
    """The entries of a reply's text: without the entries of the thinking before it and of the token that ends it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._place = "thinking" if call.reply.thinking else "before" if call.reply.reasoning else "text"
        self._seen = ""  # the end of what came
        self._held: list[dict[str, Any]] = []  # what may begin a tag

    def take(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Of what is new in a completion."""
        found = of_completion(self._call, completion) or []
        tokens = [next(iter(position.values())).decoded_token or "" for position in completion.logprobs or ()]
        if completion.finish_reason == "stop" and completion.stop_reason is None:
            tokens = tokens[:-1]
        return [shown for token, entry in zip(tokens, found, strict=False) for shown in self._shown(token, entry)]

    def _shown(self, token: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
        self._seen = self._seen[-16:] + token
        if self._place == "before":
            begun = self._seen.lstrip()
            if "<think>".startswith(begun):
                self._held.append(entry)
                if begun == "<think>":
                    self._place = "thinking"
                return []
            if not begun.startswith("<think>"):
                self._place = "text"
                return [*self._held, entry]
            self._place = "thinking"
        if self._place == "thinking":
            if "</think>" in self._seen:
                self._place = "after"
            return []
        if self._place == "after" and not token.strip():
            return []
        self._place = "text"
        return [entry]
