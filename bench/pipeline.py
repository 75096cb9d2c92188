"""What stages of a pipeline gain on a CPU when each works on other requests: tokens a second of one process with one
thread, and of two stages with one thread each.

    python -m bench pipeline [--requests 1,8,32]     two CPUs or more; nothing else should run

One request shows what stages cost, as only one of them can work at a time. Several show what they gain: most where a
step takes as long as it has rows, as of prompts; little where it reads the weights however few rows it has.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from graphllm import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 8192, "head_dim": 64,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip


def rates(folder: Path, counts: list[int], stages: int) -> dict[str, float]:
    """Tokens a second by case, each after one round to warm up. counts: of requests at once."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256,
                               "max_num_seqs": max(counts), "max_num_batched_tokens": 512, "target": "cpu",
                               "threads": stages, "enable_prefix_caching": False}  # fmt: skip
    found = {}
    with LLM(folder, pipeline_parallel_size=stages, **options) as llm:

        def timed(requests: int, length: int, tokens: int) -> float:
            prompts = [{"prompt_token_ids": [(7 * i + k) % 8192 for i in range(length)]} for k in range(requests)]
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            llm.generate(prompts, params)
            begun = time.perf_counter()
            llm.generate(prompts, params)
            return requests / (time.perf_counter() - begun)

        for requests in counts:
            found[f"{requests} requests, tokens of answers"] = round(64 * timed(requests, 16, 64), 1)
        found["16 prompts, their tokens"] = round(192 * timed(16, 192, 1), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4,8,32", help="at once, between commas")
    args = parser.parse_args()
    counts = [int(word) for word in args.requests.split(",")]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        one, two = (rates(folder, counts, stages) for stages in (1, 2))
    for case, rate in one.items():
        print(
            f"{case:32} one process {rate:8.1f}  two stages {two[case]:8.1f}  {two[case] / rate:.2f} times", flush=True
        )


if __name__ == "__main__":
    main()
