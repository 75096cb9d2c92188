"""One chat, one prompt, on every way: random conversations over HTTP by each API, in a batch file and by `LLM.chat`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphllm.embedded import MODEL_DIR
from graphllm.engine.requests.text import Tokenizer
from tests.server.reply_parts import VALUES, spoiled
from tests.server.ways import Chat, Ways, as_items, as_turns
from tests.tiers import draws

EXAMPLES = draws(48, 2500)  # of each kind, all templates together
CALLS = (
    "{% for c in m.tool_calls or [] %}[{{ c.id }}|{{ c.function.name }}|{{ c.function.arguments | tojson }}]"
    "{% endfor %}{% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}"
)
EVERY = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
ENDS = CALLS + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "the embedded model's": None,
    "texts": EVERY + "{{ m.name }}{{ m.reasoning_content }}{{ m['content'] + '</s>' }}" + ENDS,
    "parts": EVERY + "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}/{% endfor %}" + ENDS,
    "one system message": EVERY
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}{{ m.content | trim }}" + ENDS,
    "mistral's": "{# [TOOL_CALLS] #}"
    + EVERY
    + "{% if m.content is none %}-{% else %}{{ m.content }}{% endif %}"
    + ENDS,
    "as it is": "{{ messages | tojson }}{{ tools | tojson }}{{ add_generation_prompt }}",
}

WHOLE = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["a", " b\n", "<|im_end|>", "</think>", "{{ 7*7 }}", "🙂", "\0", "\u2028", "e\u0301"]
)
TEXTS = st.integers(0, 99).flatmap(lambda i: WHOLE if i else st.sampled_from(["\ud83d", "a\ude00b"]))
CONTENT = st.none() | TEXTS | st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
IDS = st.sampled_from(["call_1", "a1B2c3D4e", "call_abc|fc_123", "x" * 256]) | TEXTS.filter(bool)
OBJECTS = st.dictionaries(WHOLE, VALUES, max_size=2)
GOOD = (
    OBJECTS.map(json.dumps)
    | OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1))
    | st.sampled_from(["", "{}", '{"a": 1, "a": 2}'])
)
BAD = st.sampled_from(['{"a": "\\ud83d"}', '{"\\ude00": 1}', "[1]", "{", '{"a": ' + "[" * 600 + "]" * 600 + "}"])
ARGUMENTS = st.integers(0, 14).flatmap(lambda i: GOOD if i else BAD)
CALL = st.builds(
    lambda id, name, arguments: {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}},
    IDS, st.sampled_from(["f", "get_weather"]), ARGUMENTS,
)  # fmt: skip
FUNCTION = {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {}}}
TOOLS = st.none() | st.sampled_from(
    [
        [{"type": "function", "function": FUNCTION}],
        [{"function": {"strict": True, **FUNCTION, "description": None}, "type": "function"}],
        [{"type": "function", "function": {**FUNCTION, "name": name}} for name in ("f", "g")],
    ]
)
ENDINGS = st.sampled_from(["begin", "begin", "begin", "plain", "continue"])


# Nothing but a call, beside a part without text.
EMPTY = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": ""}],
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
]
ROLES = st.sampled_from(["system", "developer", "user", "user", "assistant", "assistant", "tool", "tool"])


@st.composite
def histories(draw: st.DrawFn) -> Chat:
    """Any messages, or turns as they mostly come."""
    if draw(st.integers(0, 2)) == 0:
        return draw(st.lists(ROLES.flatmap(messages), min_size=1, max_size=6))
    roles = draw(st.lists(st.sampled_from(["system", "developer"]), max_size=1))
    for _ in range(draw(st.integers(1, 3))):
        roles += ["user", "assistant", *draw(st.lists(st.just("tool"), max_size=2))]
    return [draw(messages(role)) for role in roles[: draw(st.integers(len(roles) - 2, len(roles)))] or ["user"]]


@st.composite
def messages(draw: st.DrawFn, role: str) -> dict[str, Any]:
    """One message. What is null may be left out."""
    found: dict[str, Any] = {"role": role, "content": draw(CONTENT)}
    if role == "tool":
        found["tool_call_id"] = draw(IDS)
    if role == "assistant":
        found["tool_calls"] = draw(st.none() | st.lists(CALL, max_size=2))
        if draw(st.integers(0, 5)) == 0:
            found["reasoning_content"] = draw(TEXTS.filter(bool))
    if draw(st.integers(0, 9)) == 0:
        found["name"] = draw(st.sampled_from(["anna", "anna", "bert", "a b"]))
    return {name: value for name, value in found.items() if value is not None or draw(st.booleans())}


@pytest.fixture(scope="module", params=TEMPLATES)
def ways(request: pytest.FixtureRequest) -> Iterator[Ways]:
    tokenizer, template = Tokenizer.from_folder(MODEL_DIR), TEMPLATES[request.param]
    with contextlib.closing(Ways(tokenizer if template is None else tokenizer.with_chat_template(template))) as made:
        yield made


def check(ways: Ways, chat: Chat, tools: Any, end: str) -> str | None:
    """No way fails, and all take the conversation for the same prompt, or refuse it; that prompt."""
    prompt = ways.chat(chat, tools, end)
    found: dict[str, Any] = {"llm": ways.llm(chat, tools, end), "batch file": ways.batch_file(chat, tools, end)}
    if tools is None:
        found["batch"] = ways.chat_batch(chat, tools, end)
    if end == "begin":
        found["line"] = ways.plain_line(chat, tools, end)
    assert found == dict.fromkeys(found, prompt), (chat, prompt)
    assert ways.tokenize(chat, tools, end) == ways.tokens(prompt), (chat, prompt)
    return prompt


@settings(deadline=None, max_examples=EXAMPLES // len(TEMPLATES), suppress_health_check=list(HealthCheck))
@example(EMPTY, None, "begin")
@given(histories(), TOOLS, ENDINGS)
def test_every_way_makes_the_same_prompt(ways: Ways, chat: Chat, tools: Any, end: str) -> None:
    prompt = check(ways, chat, tools, end)
    if end == "begin" and (items := as_items(chat)) is not None:
        assert ways.responses(items, tools) == prompt, (items, prompt)
    if (turns := as_turns(chat, end)) is not None:
        assert ways.messages(turns, tools) == prompt, (turns, prompt)
        tokens = ways.tokens(prompt)
        assert ways.count(turns, tools) == (None if tokens is None else len(tokens))


@settings(deadline=None, max_examples=EXAMPLES // len(TEMPLATES), suppress_health_check=list(HealthCheck))
@given(histories().flatmap(lambda chat: spoiled({"messages": chat})), TOOLS, ENDINGS)
def test_what_is_no_conversation_fails_nowhere(ways: Ways, body: Any, tools: Any, end: str) -> None:
    """Something in it, at any depth, is something else."""
    chat = body.get("messages") if isinstance(body, dict) else body
    if isinstance(chat, list) and chat and all(isinstance(message, dict) for message in chat):
        check(ways, chat, tools, end)
    else:
        assert ways.chat(chat, tools, end) is None
        assert ways.tokenize(chat, tools, end) is None
