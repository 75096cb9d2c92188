"""What chat templates want of a conversation, by their source, and the prompts that they make of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.engine.chat_template.conversation import conversation
from graphllm.engine.chat_template.template import ChatTemplate

WALKS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
ADDS = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '</s>' }}{% endfor %}"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}


def rendered(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(template).render({"messages": conversation(messages)}, **options)


def said(role: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def transformers_prompt(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    found: Any = render_jinja_template([messages], chat_template=template)
    return found[0][0]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (WALKS, True),
        (ADDS, False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.get('content') %}{{ p.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}"
            "{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% macro show(c, n=0) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", True),
        ("{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            False,
        ),
        (
            "{% macro show(c) %}{% if c is not string %}{% for p in c %}{{ p.text }}{% endfor %}{% else %}{{ c }}"
            "{% endif %}{% endmacro %}{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% for line in m.content.split('!') %}{{ line }}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content[0] | upper }}{{ m.content[1:] }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
    ],
)
def test_a_template_that_walks_over_parts_gets_parts(template: str, wanted: bool) -> None:
    """And then the prompt is the one that transformers makes of parts, whichever of the two was given."""
    assert ChatTemplate(template).wants.parts == wanted
    for texts in (("hello",), ("a ", "b")):
        whole = "\n".join(texts)
        form = parts(*texts) if wanted else whole
        expected = transformers_prompt(template, [said("user", form)])
        assert rendered(template, said("user", parts(*texts))) == expected
        if len(texts) == 1:
            assert rendered(template, said("user", whole)) == expected != ""


def test_a_format_that_was_asked_for() -> None:
    tells = "{% for m in messages %}{{ m.content is string }}{% endfor %}"
    for given in ("a", parts("a", "b")):
        for form, told in (("auto", "True"), ("string", "True"), ("openai", "False")):
            assert rendered(tells, said("user", given), content_format=form) == told


@pytest.mark.parametrize("template", [ADDS, WALKS, STRICT])
def test_content_that_is_not_there_is_no_text(template: str) -> None:
    calls = {"role": "assistant", "tool_calls": [CALL]}
    prompts = {
        rendered(template, said("user", "x"), {**calls, **content}, said("tool", "1"))
        for content in ({}, {"content": None}, {"content": ""}, {"content": []})
    }
    assert len(prompts) == 1


def test_a_template_that_asks_whether_content_is_none() -> None:
    """As DeepSeek's, which tell a message of nothing but calls by it."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}{% for c in m.tool_calls %}[{{ c.function.name }}]"
        "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    for content in ({}, {"content": None}, {"content": ""}):
        assert rendered(template, {"role": "assistant", **content, "tool_calls": [CALL]}) == "[f]"
    assert rendered(template, said("user"), said("assistant", "a", tool_calls=[CALL])) == "a"


def test_arguments_are_objects() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"  # noqa: E501
    found = rendered(template, said("assistant", tool_calls=[CALL, {"function": {"name": "f", "arguments": ""}}]))
    assert found == 'city=Paris;{"city": "Paris"}{}'


SYSTEM, DEVELOPER = said("system", "A"), said("developer", "B")
USER, LATER = said("user", "x"), said("user", "y")


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([SYSTEM, DEVELOPER, USER], "<system>A\n\nB<user>x"),
        ([USER, DEVELOPER, LATER], "<system>B<user>x<user>y"),
        ([SYSTEM, USER, said("system", parts("c", "d")), LATER], "<system>A\n\nc\nd<user>x<user>y"),
        ([SYSTEM, USER, said("system"), LATER], "<system>A<user>x<user>y"),
        ([SYSTEM, USER], "<system>A<user>x"),
    ],
)
def test_system_messages_go_first_where_a_template_wants_one(messages: list[dict[str, Any]], prompt: str) -> None:
    assert rendered(STRICT, *messages) == prompt
    checked = [{**m, "content": m["content"] + "</s>"} for m in conversation(messages) if isinstance(m["content"], str)]
    if len(checked) == len(messages):  # elsewhere they stay where they are
        assert rendered(ADDS, *messages) == "".join(f"<{m['role']}>{m['content']}" for m in checked)


def test_what_joining_does_not_mend() -> None:
    """The template's own word is told, about the conversation as it was given."""
    refuses = "{{ raise_exception(messages | map(attribute='role') | join('-')) }}"
    for messages in ([SYSTEM, DEVELOPER, USER], [USER]):
        roles = "-".join(m["role"] for m in conversation(messages))
        with pytest.raises(ConfigError, match=f"^chat template: {roles}$"):
            rendered(refuses, *messages)
    with pytest.raises(ConfigError, match="must be at the beginning"):  # it is about the turn before it
        rendered(STRICT, USER, DEVELOPER)


def test_ids_for_mistral() -> None:
    template = (
        "{# [TOOL_CALLS] #}{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.id }}"
        "{% endfor %} {% endfor %}"
    )
    ids = ["call_abc|fc_123", "a1B2c3D4e", "é" * 256]
    messages = [
        said("assistant", tool_calls=[{**CALL, "id": id}]) if i < 3 else said("tool", tool_call_id=id)
        for i, id in enumerate([*ids, *ids])
    ]
    found = rendered(template, *messages).split()
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in found)
    assert (found[:3], found[1], len(set(found))) == (found[3:], "a1B2c3D4e", 3)
    assert rendered(template.replace("TOOL_CALLS", ""), *messages).split() == [*ids, *ids]
