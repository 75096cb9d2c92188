"""A chat template: what it wants of a conversation is found in its source, and it is rendered as in transformers.

Built on jinja2, which is imported when first needed (`jinja.py`). A template comes with the checkpoint or with a
request, so it runs in jinja2's sandbox on plain JSON values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from graphllm.config import ConfigError
from graphllm.engine.chat_template.conversation import REASONING, text_of

if TYPE_CHECKING:
    from graphllm.engine.chat_template.jinja import Wants

ContentFormat = Literal["auto", "string", "openai"]
_MAX_DEPTH = 128
_HALF = re.compile("[\ud800-\udfff]")
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_END = "CONTINUE-FROM-HERE "  # stands for the end of a message that is continued; templates may strip its space


class ChatTemplate:
    """A template that compiles. wants: what its source says of messages. Raises ConfigError for another one."""

    def __init__(self, source: str) -> None:
        # Here: jinja2 is imported when the first template is.
        from graphllm.engine.chat_template import jinja

        self._rendered = jinja.rendered
        self._template, self.wants = jinja.compiled(source)

    def render(self, variables: Mapping[str, Any], content_format: ContentFormat = "auto") -> str:
        """The prompt.

        variables: plain JSON values, with the messages of a conversation among them.
        content_format: "string" for content as texts and "openai" for content as parts, whatever the template says.

        Where the template refuses a system message after others, all system messages go first, as one. Raises
        ConfigError with the template's own message when it refuses.
        """
        parts = self.wants.parts if content_format == "auto" else content_format == "openai"
        wants, messages = self.wants._replace(parts=parts), variables["messages"]

        def write(messages: Sequence[Mapping[str, Any]]) -> str:
            return self._rendered(self._template, {**variables, "messages": [_as_wanted(m, wants) for m in messages]})

        try:
            return write(messages)
        except ConfigError as refusal:
            if (joined := _system_first(messages)) is None:
                raise
            try:
                return write(joined)
            except ConfigError:
                raise refusal from None


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types: a template must not reach any other object. Raises ConfigError that names the
    place for what is none, for half a surrogate pair, which no tokenizer takes, and for what is nested too deep."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where:.80} ...: nested deeper than {_MAX_DEPTH} levels; give less")
    if isinstance(value, str):
        if _HALF.search(value):
            raise no_text(value, where)
        return str(value)
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(str(k), where): plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise ConfigError(f"{where}: a {type(value).__name__} cannot be passed to the template; give plain JSON values")


def no_text(value: str, where: str) -> ConfigError:
    """The error about a string with half of a surrogate pair."""
    half = _HALF.search(value)
    found = repr(half[0]) if half else f"{value!r:.80}"
    return ConfigError(f"{where} has {found}: half of a surrogate pair is no text; give whole characters")


def with_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with a mark at the end of its last message, for `up_to_the_end`."""
    *earlier, last = messages
    content = last["content"]
    if not text_of(last):
        raise ConfigError("continue_final_message is True: the last message has no text; give some, or leave it out")
    if isinstance(content, str):
        return [*earlier, {**last, "content": content + _END}]
    *parts, part = content
    return [*earlier, {**last, "content": [*parts, {**part, "text": part["text"] + _END}]}]


def up_to_the_end(prompt: str) -> str:
    """What stands before the mark. Raises ConfigError where there is none."""
    before, found, after = prompt.rpartition(_END.rstrip())
    if not found:
        raise ConfigError(
            "continue_final_message is True: the chat template does not show the last message's text as it is; leave "
            "it out"
        )
    return before if after.startswith(" ") else before.rstrip()  # as templates strip what they show


def _as_wanted(given: Mapping[str, Any], wants: Wants) -> dict[str, Any]:
    """A message as the template takes it."""
    message = {name: value for name, value in given.items() if value is not None}
    content, calls = message.get("content"), message.get("tool_calls")
    if wants.none and calls and (content == "" or (_is_text(content) and not text_of(message))):
        message["content"] = None
    elif wants.parts and isinstance(content, str):
        message["content"] = [{"type": "text", "text": content}]
    elif not wants.parts and _is_text(content):
        message["content"] = text_of(message)
    if wants.short_ids:
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        if calls:
            message["tool_calls"] = [{**c, "id": _short_id(c["id"])} if "id" in c else c for c in calls]
    # Templates differ in the name under which they read the reasoning of an earlier turn, so it gets all of them.
    thought = next((message[name] for name in REASONING if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _is_text(content: object) -> bool:
    """Whether it is parts of text and nothing else."""
    return isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content)


def _short_id(given: object) -> str:
    text = str(given)
    return text if _MISTRAL_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _system_first(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The same conversation with one system message, before the others; None where it has no more than that. What
    stands at the end is about the turn before it, and keeps its place."""
    system = [m for m in messages if m.get("role") == "system"]
    if not system or system == [messages[0]] or messages[-1].get("role") == "system":
        return None
    if not all(isinstance(m.get("content"), str) or _is_text(m.get("content")) for m in system):
        return None
    text = "\n\n".join(filter(None, map(text_of, system)))
    return [{"role": "system", "content": text}, *(m for m in messages if m.get("role") != "system")]
