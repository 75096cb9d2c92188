"""What speculative decoding costs and gives on one GPU, with random weights of a real shape.

    python bench/speculation_gpu.py [--cases verify,ngram,eagle,eagle3] [--drafts 4] [--out FILE.json]

verify: a step of drafts + 1 tokens for each of 1 and 32 sequences against a plain decode step. ngram: the same with
prompt lookup on the device behind it, whose time is the difference. eagle, eagle3: tokens a second of one sequence with
a head of that form, against none; each draft is accepted with probability 0.8 whatever it is, which only a benchmark
may ask for (`rejection_sample_method` synthetic); and the share of time in which the GPU runs no kernel. Each case is
compiled and run in a process of its own, about a minute on an H200; --shape tiny tries it out anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_step import SHAPES, batch

CONTEXT, STEPS, TOKENS, ACCEPTANCE = 1024, 50, 512, 0.8
SHAPES = SHAPES | {
    "tiny": {
        **SHAPES["llama3.1-8b"], "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 1024, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def head_config(method: str, shape: dict[str, Any]) -> dict[str, Any]:
    """config.json of a head for a shape: one layer of its widths, EAGLE-3 with 32,000 tokens of its own."""
    own = {"draft_vocab_size": min(32_000, shape["vocab_size"] // 2)} if method == "eagle3" else {}
    return {**shape, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], **own}


def steps(executor: Any, sequences: int, tokens: int, count: int) -> float:
    """Milliseconds of a step of so many sequences with so many tokens each, all of which are sampled from."""
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


def worker(case: str, shape: str, drafts: int) -> None:
    """Measure one case; prints a line of JSON."""
    from graphllm import LLM

    tiny = shape == "tiny"
    folder = Path(tempfile.mkdtemp(prefix="speculation-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
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
        found = {"compile and load s": round(time.perf_counter() - start, 1)} | measure(llm, case, drafts, tiny)
    print(json.dumps(found), flush=True)


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
            from gpu_table import profiled

            engine = llm.llm_engine
            engine.add_request("profiled", {"prompt_token_ids": list(range(5, 69))}, params)
            for _ in range(20):
                engine.step()
            found["GPU idle share"] = profiled(engine.core, 40)["GPU idle share"]
    return found


def _executor(llm: Any) -> Any:
    """The executor of an LLM whose engine runs in this process."""
    return llm.llm_engine.core.executor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="verify,ngram,plain,eagle,eagle3")
    parser.add_argument("--shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--drafts", type=int, default=0, help="of a step; 0: 3 to verify, 4 of a head")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.shape, args.drafts)
        return
    results: dict[str, Any] = {"shape": args.shape, "acceptance": ACCEPTANCE}
    for case in args.cases.split(","):
        drafts = args.drafts or (3 if case in ("verify", "ngram") else 4)
        command = [sys.executable, __file__, "--worker", case, "--shape", args.shape, "--drafts", str(drafts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        results[case] = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"failed": done.returncode}
        results[case]["drafts"] = drafts
        if "tokens/s" in results[case] and "tokens/s" in (plain := results.get("plain", {})) and case != "plain":
            results[case]["speed-up"] = round(results[case]["tokens/s"] / plain["tokens/s"], 2)
        print(case, json.dumps(results[case]), flush=True)
    if {"verify", "ngram"} <= results.keys():
        for n in (1, 32):
            pair = [results[c].get(f"batch {n}", {}).get("verify ms") for c in ("verify", "ngram")]
            if None not in pair:
                results[f"n-gram adds ms at batch {n}"] = round(pair[1] - pair[0], 4)
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
