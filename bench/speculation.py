"""Speculative decoding of the embedded model, one request at a time: drafts that are right, tokens of a step, speed.

    python bench/speculation.py [--methods eagle3,medusa,draft_model,ngram] [--count 8] [--out FILE.json]

By kind of task, questions that the model has not seen, greedy; each method's answers are checked against those without
drafts. Copying tasks repeat what stands in the prompt, which is what ngram guesses.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

from graphllm import LLM, SamplingParams
from graphllm.embedded import DRAFTS
from graphllm.embedded.tasks import draw

KINDS = {
    "facts": ("capital", "opposite", "plural"),
    "sums": ("add_large", "word_problem", "multiply"),
    "copying": ("sort_numbers", "call_tool", "use_tool_result"),
    "talk": ("persona", "remember", "several_turns"),
}
REPEATS = 3


def measure(config: dict[str, Any] | None, count: int, fields: dict[str, Any]) -> dict[str, Any]:
    """By kind of task: texts, seconds, and what drafts gave."""
    params, found = SamplingParams(temperature=0.0, max_tokens=160), {}
    with LLM(target="cpu", speculative_config=config, enable_prefix_caching=False, **fields) as llm:
        for kind, names in KINDS.items():
            rng = Random(f"speculation {kind}")
            chats = [draw(rng, name, held_out=True) for name in names for _ in range(count)]
            times, texts = [], []
            before = llm._core.stats()
            for _ in range(REPEATS):
                start = time.perf_counter()
                answers = [
                    llm.chat(chat.messages, params, tools=chat.tools or None, use_tqdm=False)[0].outputs[0].token_ids
                    for chat in chats
                ]
                times.append(time.perf_counter() - start)
                texts = [list(a) for a in answers]
            after = llm._core.stats()
            drafted = after.draft_tokens - before.draft_tokens
            right = sum(after.accepted_tokens) - sum(before.accepted_tokens)
            tokens = sum(map(len, texts))
            found[kind] = {
                "texts": texts,
                "seconds": min(times),
                "tokens": tokens,
                "tokens/s": round(tokens / min(times)),
            }
            if drafted:
                steps = after.drafts - before.drafts
                found[kind] |= {"acceptance": round(right / drafted, 3), "tokens a step": round(1 + right / steps, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join((*DRAFTS, "ngram")))
    parser.add_argument("--count", type=int, default=8, help="questions of each task")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    fields = {"backend": args.backend, "max_num_seqs": 2, "max_num_batched_tokens": 1024}
    plain = measure(None, args.count, fields)
    table: dict[str, Any] = {"plain": {k: {"tokens/s": row["tokens/s"]} for k, row in plain.items()}}
    for method in args.methods.split(","):
        rows = measure({"method": method, "num_speculative_tokens": args.drafts}, args.count, fields)
        for kind, row in rows.items():
            row["same text"] = row.pop("texts") == plain[kind]["texts"]
            row["speed-up"] = round(plain[kind]["seconds"] / row.pop("seconds"), 2)
        table[method] = rows
        print(method, json.dumps(rows), flush=True)
    text = json.dumps(table, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
