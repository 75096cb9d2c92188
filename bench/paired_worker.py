"""The process that `paired` starts for a tree: `python bench/paired_worker.py FOLDER OPTIONS STEPS`.

It answers rows from stdin with figures. It knows nothing of graphllm but `LLM`, and nothing of this folder, because
PYTHONPATH names the tree that it measures.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any


def main(folder: str, options: dict[str, Any], steps: int) -> None:
    """Load the model, say "ready", then answer a row a line."""
    from graphllm import LLM, SamplingParams

    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    rng = random.Random(0)

    def run(lengths: list[tuple[int, int]]) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(1000) for _ in range(n)]} for n, _ in lengths]
        params = [SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True) for _, out in lengths]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        texts = {tuple(o.outputs[0].token_ids) for o in outputs if len(o.outputs[0].token_ids) > 1}
        long = sum(out > 1 for _, out in lengths)
        assert long < 2 or len(texts) > 1, f"the work is not real: all {long} sequences have the same tokens"
        return seconds

    run([(128, 1)])
    print("ready", flush=True)
    for line in sys.stdin:
        kind, _, size = line.strip().partition("-")
        if kind == "decode":
            few, many = (run([(128, 1 + n)] * int(size)) for n in (0, steps))
            print(1e3 * (many - few) / steps, flush=True)
        elif kind == "ttft":
            print(1e3 * run([(int(size), 1)]), flush=True)
        elif kind == "prefill":
            count, length = map(int, size.split("x"))
            print(count * length / run([(length, 1)] * count), flush=True)
        else:
            sizes = random.Random(1)
            lengths = [(sizes.randint(100, 1024), sizes.randint(100, 1024)) for _ in range(int(size or 1000))]
            print(sum(out for _, out in lengths) / run(lengths), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
