"""Measures the embedded model on held-out questions: `python -m bench.training.evaluate DIR`.

It answers greedily, with transformers or, much faster on a CPU, with graphllm. Prints a table and writes it into the
folder's model card.
"""

import argparse
import re
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.training.tasks import TASKS, Sample, draw
from graphllm import LLM, SamplingParams
from graphllm.embedded import MODEL_DIR

MAX_NEW_TOKENS = 320
BATCH = {"cuda": 1000, "cpu": 200}
"""Questions that are answered together."""
CLEAR_LEAD = 1.0
"""Logits by which every token of an answer has to lead for rounding not to change it."""


@dataclass(frozen=True)
class Answer:
    text: str
    lead: float
    """The smallest distance, over the answer's tokens, from the chosen logit to the next one."""


def held_out(name: str, count: int, seed: int) -> list[Sample]:
    """Up to `count` different held-out samples: a table of facts may have fewer."""
    rng = Random(f"{seed} {name}")
    found: dict[str, Sample] = {}
    for _ in range(4 * count):
        sample = draw(rng, name, held_out=True)
        found[repr((sample.messages, sample.tools))] = sample
        if len(found) == count:
            break
    return list(found.values())


def rendered(tokenizer: Any, samples: list[Sample]) -> list[str]:
    """The prompts of chats."""
    return [
        tokenizer.apply_chat_template(s.messages, tools=s.tools or None, add_generation_prompt=True, tokenize=False)
        for s in samples
    ]


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, samples: list[Sample]) -> list[Answer]:
    """What the model says to a batch of chats, greedily."""
    tokenizer.padding_side = "left"
    prompts = rendered(tokenizer, samples)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = output.sequences[:, inputs["input_ids"].shape[1] :]
    best = torch.stack([step.float().topk(2).values for step in output.logits], dim=1)
    leads = (best[..., 0] - best[..., 1]).masked_fill(ids == tokenizer.pad_token_id, torch.inf).amin(dim=1)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [Answer(text, lead) for text, lead in zip(texts, leads.tolist(), strict=True)]


def answers_of_all(model: Any, tokenizer: Any, samples: list[Sample]) -> list[Answer]:
    """Questions with answers of like length are answered together: a batch goes on until its last answer ends."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].answer))
    found: dict[int, Answer] = {}
    size = BATCH[model.device.type]
    for at in range(0, len(order), size):
        part = order[at : at + size]
        found.update(zip(part, answers(model, tokenizer, [samples[i] for i in part]), strict=True))
    return [found[i] for i in range(len(samples))]


def answers_of_engine(folder: Path, tokenizer: Any, samples: list[Sample]) -> list[Answer]:
    """The same with graphllm, in the checkpoint's dtype."""
    llm = LLM(folder)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, logprobs=2)
    outputs = [request.outputs[0] for request in llm.generate(rendered(tokenizer, samples), params)]
    llm.close()
    found = []
    for output in outputs:
        best = [sorted((entry.logprob for entry in at.values()), reverse=True) for at in output.logprobs]
        found.append(Answer(output.text, min(first - second for first, second, *_ in best)))
    return found


def table(rows: list[tuple[str, int, float, float]]) -> str:
    """Markdown: a row a task, the mean first."""
    right, clear = (sum(values) / len(rows) for values in ([row[2] for row in rows], [row[3] for row in rows]))
    mean = ("**mean over tasks**", sum(row[1] for row in rows), right, clear)
    lines = [f"| {name} | {count} | {right:.1%} | {clear:.1%} |" for name, count, right, clear in (mean, *rows)]
    head = f"| task | questions | right | every token leads by {CLEAR_LEAD:g} |\n| --- | ---: | ---: | ---: |"
    return "\n".join((head, *lines))


def write_card(folder: Path, text: str) -> None:
    card = folder / "README.md"
    marked = f"<!-- accuracy -->\n{text}\n<!-- /accuracy -->"
    card.write_text(re.sub(r"<!-- accuracy -->.*<!-- /accuracy -->", lambda _: marked, card.read_text(), flags=re.S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--count", type=int, default=200, help="held-out questions a task, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("transformers", "graphllm"), default="transformers", help="what answers")
    parser.add_argument("--show", type=int, default=2, help="wrong answers to print a task")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    start, questions = time.monotonic(), {name: held_out(name, args.count, args.seed) for name in TASKS}
    every = [sample for samples in questions.values() for sample in samples]
    if args.engine == "graphllm":
        found = iter(answers_of_engine(args.folder, tokenizer, every))
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype="auto")
        found = iter(answers_of_all(model.to(device).eval(), tokenizer, every))
    rows = []
    for name, samples in questions.items():
        said = list(islice(found, len(samples)))
        wrong = [(s, a) for s, a in zip(samples, said, strict=True) if not s.accepts(a.text)]
        clear = sum(answer.lead >= CLEAR_LEAD for answer in said) / len(said)
        rows.append((name, len(samples), 1 - len(wrong) / len(samples), clear))
        for sample, answer in wrong[: args.show]:
            print(f"{name}: {sample.messages[-1]['content'][-80:]!r}: {answer.text[:80]!r}, not {sample.answer[:80]!r}")
    text = table(rows)
    print(text, f"{time.monotonic() - start:.0f} s", sep="\n")
    command = f"    python -m bench.training.evaluate DIR --count {args.count} --seed {args.seed}"
    command += f" --engine {args.engine}" if args.engine != "transformers" else ""
    intro = f"Held-out questions, answered greedily in bf16 with {args.engine} on {device}:\n\n{command}\n\n"
    write_card(args.folder, f"## Accuracy\n\n{intro}{text}")


if __name__ == "__main__":
    main()
