"""The process of `graphllm.engine.process.template_trial`: renders one chat template a line of stdin, within its
limits. Beyond them it ends. It lives for as long as its stdin does."""

from __future__ import annotations

import sys

import msgspec

from graphllm.config import ConfigError
from graphllm.engine.chat_template.template import ChatTemplate
from graphllm.engine.process.limited_process import limit_memory, limit_time
from graphllm.engine.process.template_trial import CPU_SECONDS, MAX_TEXT, MEMORY_MB, Question, Rendered


def main() -> None:
    """Until stdin closes."""
    sys.stdin.buffer.readline()
    ChatTemplate("{{ messages | tojson }}").render({"messages": []})  # what is made once is not limited
    limit_memory(MEMORY_MB << 20)
    _answer(Rendered())
    for line in sys.stdin.buffer:
        limit_time(CPU_SECONDS)
        question = msgspec.json.decode(line, type=Question)
        try:
            text = ChatTemplate(question.template).render(question.variables)
        except (ConfigError, RecursionError) as refusal:
            _answer(Rendered(wrong=str(refusal).removeprefix("chat template: ")))
            continue
        if len(text) > MAX_TEXT:
            _answer(Rendered(wrong=f"its text has {len(text)} characters; at most {MAX_TEXT} are taken"))
        else:
            _answer(Rendered(text))


def _answer(answer: Rendered) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
