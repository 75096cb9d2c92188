"""The process of `graphllm.engine.template_trial`: renders one chat template a line of stdin, within its limits. Beyond
them it ends. It lives for as long as its stdin does."""

from __future__ import annotations

import sys

import msgspec

from graphllm.config import ConfigError
from graphllm.engine.chat.template import ChatTemplate
from graphllm.engine.limited_process import limit_memory, limit_time
from graphllm.engine.template_trial import CPU_SECONDS, MAX_TEXT, MEMORY_MB, Answer, Question


def main() -> None:
    """Until stdin closes."""
    sys.stdin.buffer.readline()
    ChatTemplate("{{ messages | tojson }}").render({"messages": []})  # what is made once is not limited
    limit_memory(MEMORY_MB << 20)
    _answer(Answer())
    for line in sys.stdin.buffer:
        limit_time(CPU_SECONDS)
        question = msgspec.json.decode(line, type=Question)
        try:
            text = ChatTemplate(question.template).render(question.variables)
        except (ConfigError, RecursionError) as refusal:
            _answer(Answer(wrong=str(refusal).removeprefix("chat template: ")))
            continue
        if len(text) > MAX_TEXT:
            _answer(Answer(wrong=f"its text has {len(text)} characters; at most {MAX_TEXT} are taken"))
        else:
            _answer(Answer(text))


def _answer(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
