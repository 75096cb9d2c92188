"""What speculative decoding costs and gives on one GPU, with random weights of a real shape.

    python -m bench speculation_gpu [--kinds verify,ngram,plain,eagle,eagle3] [--drafts 4]

verify: a step of drafts + 1 tokens for each of 1 and 32 sequences against a plain decode step. ngram: the same with
prompt lookup on the device after it; its time is the difference. eagle, eagle3: tokens a second of one sequence with
a head of that form, against none; each draft is accepted with probability 0.8 whatever it is, which only a benchmark
may ask for (`rejection_sample_method` synthetic); and the share of time in which the GPU runs no kernel. Each kind is
compiled and run in a process of its own, about a minute on an H200; --shape tiny tries it out anywhere.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.driving import batch, profiled
from bench.harness import Case, in_process
from bench.models import SHAPES, new_folder

CASES = [
    ("speculation_gpu", {"kinds": ("verify", "ngram", "plain", "eagle", "eagle3"), "shape": "llama3.1-8b",
                         "drafts": 0}),
]  # fmt: skip
HELP = {"kinds": "kinds of drafts", "shape": "a shape, or tiny", "drafts": "of a step; 0: 3 to verify, 4 of a head"}
CONTEXT, STEPS, TOKENS, ACCEPTANCE = 1024, 50, 512, 0.8


def head_config(method: str, shape: dict[str, Any]) -> dict[str, Any]:
    """config.json of a head for a shape: one layer of its widths, EAGLE-3 with 32,000 tokens of its own."""
    own = {"draft_vocab_size": min(32_000, shape["vocab_size"] // 2)} if method == "eagle3" else {}
    return {**shape, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], **own}


def steps(executor: Any, sequences: int, tokens: int, count: int) -> float:
    """Milliseconds of a step of ``sequences`` with ``tokens`` tokens each; all are sampled from."""
    import numpy as np
    import torch

    step = batch(sequences, tokens, min(CONTEXT, 64 * executor.layout.groups[0].block_size), executor)
    if tokens > 1:
        n = sequences * tokens
        rows = {
            "logits_indices": np.arange(n, dtype=np.int32),
            "sequence_ids": np.repeat(np.arange(sequences, dtype=np.int32), tokens),
            "row_start_loc": np.arange(0, n + 1, tokens, dtype=np.int32),
            "row_slots": np.repeat(np.arange(sequences, dtype=np.int32), tokens),
        }
        step = step._replace(rows=n, query_len=tokens, arrays={**step.arrays, **rows})
    for _ in range(5):
        executor.run(step)
    runner = executor._main.bound("plain", executor._main.pick(step))
    times: list[float] = []

    def replay() -> None:
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(count):
                runner.run("")
            if executor.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            times.append(1e3 * (time.perf_counter() - start) / count)

    executor.stream.submit(replay).result()
    return round(statistics.median(times), 4)


def worker(case: str, shape: str, drafts: int) -> dict[str, Any]:
    """Measure one kind, in a process of its own."""
    from graphllm import LLM

    tiny = shape == "tiny"
    folder = new_folder(shape)
    fields: dict[str, Any] = {"num_speculative_tokens": drafts}
    if case == "ngram":
        fields |= {"prompt_lookup_max": 3}
    elif case != "verify":
        (folder / "head").mkdir()
        (folder / "head" / "config.json").write_text(json.dumps(head_config(case, SHAPES[shape])))
        fields |= {"speculative_model": str(folder / "head"), "speculative_method": case,
                   "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": ACCEPTANCE}  # fmt: skip
    if case == "plain":
        fields = {}
    if tiny:
        fields |= {"backend": "eager", "dtype": "float32", "max_num_batched_tokens": 256}
    start = time.perf_counter()
    with LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=32,
        artifact="rebuild", **fields,
    ) as llm:  # fmt: skip
        started = round(time.perf_counter() - start, 1)
        return {"compile and load s": started, **measure(llm, case, drafts, tiny)}


def measure(llm: Any, case: str, drafts: int, tiny: bool) -> dict[str, Any]:
    """What a case shows, in a loaded engine."""
    from graphllm import SamplingParams

    found: dict[str, Any] = {}
    if case in ("verify", "ngram"):
        executor = _executor(llm)
        for n in (1, 32):
            plain, verify = (steps(executor, n, t, 2 if tiny else STEPS) for t in (1, drafts + 1))
            found[f"batch {n}"] = {"plain ms": plain, "verify ms": verify, "ratio": round(verify / plain, 3)}
    else:
        length = 48 if tiny else TOKENS
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        rates = []
        for _ in range(2 if tiny else 4):
            begun = time.perf_counter()
            llm.generate([{"prompt_token_ids": list(range(5, 69))}], params, use_tqdm=False)
            rates.append(length / (time.perf_counter() - begun))
        found["tokens/s"] = round(max(rates), 1)
        if not tiny:
            engine = llm.llm_engine
            engine.add_request("profiled", {"prompt_token_ids": list(range(5, 69))}, params)
            for _ in range(20):
                engine.step()
            found["GPU idle share"] = profiled(engine.core, 40)["GPU idle share"]
    return found


def _executor(llm: Any) -> Any:
    """The executor of an LLM with its engine in this process."""
    return llm.llm_engine.core.executor


def run(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each kind."""
    found: dict[str, Any] = {}
    for kind in case.kinds:
        drafts = case.drafts or (3 if kind in ("verify", "ngram") else 4)
        found[kind] = in_process(worker, kind, case.shape, drafts) | {"drafts": drafts, "acceptance": ACCEPTANCE}
        if "tokens/s" in found[kind] and "tokens/s" in (plain := found.get("plain", {})) and kind != "plain":
            found[kind]["speed-up"] = round(found[kind]["tokens/s"] / plain["tokens/s"], 2)
        yield {kind: found[kind]}
    if {"verify", "ngram"} <= found.keys():
        for n in (1, 32):
            pair = [found[kind].get(f"batch {n}", {}).get("verify ms") for kind in ("verify", "ngram")]
            if None not in pair:
                yield {f"n-gram, batch {n}": {"adds ms": round(pair[1] - pair[0], 4)}}
