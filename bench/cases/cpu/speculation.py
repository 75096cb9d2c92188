"""Speculative decoding of the embedded model, one request at a time: drafts that are right, tokens of a step, speed.

    python -m bench speculation [--methods "suffix;eagle3, tree"] [--count 6]

By kind of task, questions that the model has not seen, greedy; each method's answers are checked against answers
without drafts. "copying" repeats text of the prompt, also in another order or with other signs, "copy" the very words,
"long copy" at least 24 characters of it. "again" is asked a second time in one chat, so its answers stand there, and so
do the longer ones of "passages": that is what ngram and suffix guess. Speed-ups are against no drafts: "decoding" of
the time after an answer's first token, the other of all of it, the prompt included. All artifacts are compiled first,
--jobs at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

from bench.harness import Case, worker_command, worker_environment

KINDS = {
    "facts": ("capital", "opposite", "plural"),
    "sums": ("add_large", "word_problem", "multiply"),
    "texts": ("story", "poem", "unknown"),
    "talk": ("persona", "remember", "several_turns"),
    "tools": ("call_tool", "call_unseen_tool", "use_tool_result"),
    "copying": ("copy", "sort_numbers", "list_json"),
    "copy": ("copy",),
    "long copy": ("copy",),
    "again": ("story", "count_range", "call_tool_twice"),
    "passages": ("story", "poem", "code"),
}
TWICE, LONG = ("again", "passages"), {"long copy": 24}  # kinds that are asked twice; characters of an answer at least
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]"
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},  # after five tokens that stood there before
    "ngram, 1 to 5": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 1,
    },
    "ngram_host": {"method": "ngram_host", "num_speculative_tokens": 5},
    # The answers of the repeats before are not looked up, as nobody asks the same four times.
    "suffix": {"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_cached_requests": 0},
    "draft_model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
    "medusa": {"method": "medusa"},
    "eagle3, tree": {"method": "eagle3", "speculative_token_tree": TREE},
    "medusa, tree": {"method": "medusa", "speculative_token_tree": TREE},
}
CASES = [
    ("speculation", {"methods": ";".join(METHODS), "kinds": ";".join(KINDS), "by_task": False, "count": 6,
                     "target": "cpu", "backend": "inductor", "drafts": 0, "tune": False, "jobs": 2}),
    ("speculation_embedded_gpu", {"methods": "plain;ngram;ngram, 1 to 5;suffix;eagle3", "kinds": ";".join(KINDS),
                                  "by_task": False, "count": 2, "target": "cuda", "backend": "inductor", "drafts": 0,
                                  "tune": False, "jobs": 3}),
]  # fmt: skip
HELP = {
    "methods": "names of METHODS, with semicolons between them",
    "kinds": "kinds of tasks, with semicolons between them",
    "by_task": "a row for each task of a kind",
    "count": "questions of each task",
    "target": "cpu or cuda",
    "drafts": "drafts of a step; 0: 5 guesses, and as many as a head is made for",
    "tune": "time kernels while compiling, which takes longer",
    "jobs": "processes that compile at once",
}
REPEATS, MAX_TOKENS = 6, 160  # the first of the repeats is not timed


def opened(name: str, args: Case) -> Any:
    """An LLM that drafts by that method."""
    from graphllm import LLM

    config = METHODS[name]
    if config and args.drafts and "speculative_token_tree" not in config:
        config = {**config, "num_speculative_tokens": args.drafts}
    return LLM(
        target=args.target, backend=args.backend, speculative_config=config, enable_prefix_caching=False,
        max_num_seqs=1, max_num_batched_tokens=1024, kv_cache_memory_bytes=1 << 27, tune=args.tune,
    )  # fmt: skip


def questions(count: int, kinds: list[str], by_task: bool) -> dict[str, list[Any]]:
    """By kind of task, or by task of each kind, messages and tools."""
    from bench.training.tasks import draw

    found: dict[str, list[Any]] = {}
    for kind in kinds:
        rng, least = Random(f"speculation {kind}"), LONG.get(kind, 0)
        for name in KINDS[kind]:
            chats: list[Any] = []
            while len(chats) < count:
                chat = draw(rng, name, held_out=True)
                if len(chat.answer) >= least:
                    chats.append(chat)
            found.setdefault(f"{kind}: {name}" if by_task else kind, []).extend(
                ([*chat.conversation(), chat.messages[-1]] if kind in TWICE else chat.messages, chat.tools or None)
                for chat in chats
            )
    return found


def answers(llm: Any, asked: list[Any]) -> tuple[list[list[int]], float, float]:
    """What an LLM says, one question after the other: tokens, seconds, and seconds after each first token."""
    from graphllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    start, decoding, texts = time.perf_counter(), 0.0, []
    for messages, tools in asked:
        output = llm.chat(messages, params, tools=tools, use_tqdm=False)[0]
        decoding += output.metrics.last_token_time - output.metrics.first_token_time
        texts.append(list(output.outputs[0].token_ids))
    return texts, time.perf_counter() - start, decoding


def measure(llms: dict[str, Any], asked_by_kind: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """By method and kind of task. Methods take turns, so that a machine's moods meet all of them."""
    table: dict[str, dict[str, Any]] = {name: {} for name in llms}
    for kind, asked in asked_by_kind.items():
        before = {name: llm.llm_engine.core.stats() for name, llm in llms.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
        texts = {}
        for _ in range(REPEATS):
            for name, llm in llms.items():
                texts[name], *seconds = answers(llm, asked)
                times[name].append((seconds[0], seconds[1]))
        fastest = {name: [min(t) for t in zip(*found[1:], strict=True)] for name, found in times.items()}
        tokens = sum(map(len, texts["plain"]))
        for name, llm in llms.items():
            after = llm.llm_engine.core.stats()
            whole, decoding = fastest[name]
            row: dict[str, Any] = {"tokens": tokens, "decoding tokens/s": round((tokens - len(asked)) / decoding)}
            if name != "plain":
                row["same text"] = texts[name] == texts["plain"]
                row["decoding speed-up"] = round(fastest["plain"][1] / decoding, 2)
                row["speed-up"] = round(fastest["plain"][0] / whole, 2)
            if drafted := after.draft_tokens - before[name].draft_tokens:
                right = sum(after.accepted_tokens) - sum(before[name].accepted_tokens)
                row["acceptance"] = round(right / drafted, 3)
                row["tokens a step with drafts"] = round(1 + right / (after.drafts - before[name].drafts), 2)
            table[name][kind] = row
            print(f"{kind}, {name}: {json.dumps(row)}", flush=True)
    return table


def compile_method(name: str, settings: dict[str, Any]) -> None:
    """Open and close the LLM of a method, in a process of its own."""
    opened(name, Case("speculation", settings)).close()


def prepare(names: list[str], args: Case) -> None:
    """Compile what is not compiled yet, each in a process of its own."""
    running: list[subprocess.Popen[bytes]] = []
    for name in names:
        while len([p for p in running if p.poll() is None]) >= args.jobs:
            time.sleep(0.1)
        settings = {setting: getattr(args, setting) for setting in ("target", "backend", "drafts", "tune")}
        command = worker_command("call", compile_method, name, settings)
        running.append(subprocess.Popen(command, stdout=sys.stderr, env=worker_environment()))
    if any(p.wait() for p in running):
        raise SystemExit("a method could not be compiled")


def run(args: Case) -> Iterator[dict[str, Any]]:
    """A row for each method and kind of task."""
    names = [name for name in METHODS if name == "plain" or name in args.methods.split(";")]
    start = time.perf_counter()
    prepare(names, args)
    compiled = round(time.perf_counter() - start)
    llms = {name: opened(name, args) for name in names}
    table = measure(llms, questions(args.count, args.kinds.split(";"), args.by_task))
    for llm in llms.values():
        llm.close()
    yield {"seconds": {"compiling": compiled, "whole": round(time.perf_counter() - start)}, **table}
    if not all(row.get("same text", True) for rows in table.values() for row in rows.values()):
        raise SystemExit("texts differ from those without drafts")
