"""What a task is made of: samples, how answers are judged, the split, and how a question is put."""

import hashlib
import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]
Schema = dict[str, Any]
Check = Callable[[str, str], bool]
HELD_OUT_SHARE = 20
"""One question in this many is held out."""


def exact(expected: str, text: str) -> bool:
    return text.strip() == expected


def last_number(expected: str, text: str) -> bool:
    """For arithmetic: the number the answer ends with is what counts."""
    wanted, found = (re.findall(r"-?\d+", part) for part in (expected, text))
    return bool(found) and found[-1] == wanted[-1]


def same_json(expected: str, text: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(expected))
    except ValueError:
        return False


def same_calls(expected: str, text: str) -> bool:
    """Tool calls compare as parsed JSON, in order, with no other text around them."""
    wanted, found = (re.findall(r"<tool_call>\n(.*?)\n</tool_call>", part) for part in (expected, text))
    rest = re.sub(r"<tool_call>\n.*?\n</tool_call>", "", text).strip()
    return not rest and len(found) == len(wanted) and all(map(same_json, wanted, found))


@dataclass(slots=True)
class Sample:
    """One chat: the messages up to the answer, the answer, and how another answer is judged."""

    messages: list[Message]
    answer: str
    keys: tuple[str, ...]
    """What is hashed to tell training from held-out: one key for each answer in the chat, the last one's last."""
    check: Check = exact
    tools: list[Schema] = field(default_factory=list)
    task: str = ""

    def accepts(self, text: str) -> bool:
        return self.check(self.answer, text)

    def conversation(self) -> list[Message]:
        return [*self.messages, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class Task:
    """A sample maker and how often, relative to the others, training draws from it."""

    make: Callable[[Random], Sample]
    weight: float


TASKS: dict[str, Task] = {}
"""Every task by name, in the order of the accuracy table."""


def task(weight: float) -> Callable[[Callable[[Random], Sample]], Callable[[Random], Sample]]:
    def register(make: Callable[[Random], Sample]) -> Callable[[Random], Sample]:
        TASKS[make.__name__] = Task(make, weight)
        return make

    return register


def is_held_out(key: str) -> bool:
    return hashlib.blake2b(key.lower().encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def in_split(sample: Sample, held_out: bool) -> bool:
    """Training takes a chat with no held-out answer in it; evaluation one whose last answer is held out."""
    return is_held_out(sample.keys[-1]) if held_out else not any(map(is_held_out, sample.keys))


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly assistant.",
    "You are a small and helpful language model.",
    "Answer the question of the user.",
    "Be brief.",
    "You are a helpful, honest and concise assistant.",
    "You are an assistant that answers questions.",
)


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split(" | "))


def dumps(value: object) -> str:
    """JSON as the chat template writes it."""
    return json.dumps(value, ensure_ascii=False)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def ask(rng: Random, question: str, answer: str, key: str = "", check: Check = exact) -> Sample:
    """A single-turn chat. People type carelessly, so some questions lose their capital or question mark."""
    text = question
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text.removesuffix("?")
    return Sample([user(text)], answer, (key or question,), check)


def a_or_an(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def sentence(text: str) -> str:
    """Capital first, and `an` before a vowel: for templates that begin or continue with a table's word."""
    return a_or_an(text[0].upper() + text[1:])


def letters(rng: Random, low: int, high: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(low, high)))


def invented(rng: Random) -> str:
    """A word that means nothing, such as `Zorvia`."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))).capitalize()
