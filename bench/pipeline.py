"""What stages of a pipeline gain on a CPU when each works on other requests: tokens a second of one process, and of two
stages with as many threads in all.

    python -m bench pipeline [--requests 8] [--tokens 64]     two CPUs or more; nothing else should run

One request alone shows what the stages cost, as only one can work at a time; several show what they gain.
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


def tokens_per_second(folder: Path, requests: int, tokens: int, stages: int, threads: int) -> float:
    """Of so many requests at once, after one round to warm up."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256,
                               "max_num_seqs": max(2, requests), "target": "cpu", "threads": threads}  # fmt: skip
    prompts = [{"prompt_token_ids": [7 * i + k for i in range(16)]} for k in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with LLM(folder, pipeline_parallel_size=stages, enable_prefix_caching=False, **options) as llm:
        llm.generate(prompts, params)
        begun = time.perf_counter()
        llm.generate(prompts, params)
        return requests * tokens / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for requests in (1, args.requests):
            row = {
                f"{stages} stages, {threads} threads": round(
                    tokens_per_second(folder, requests, args.tokens, stages, threads), 1
                )
                for stages, threads in ((1, 1), (1, 2), (2, 2))
            }
            print(json.dumps({"requests": requests, "tokens/s": row}), flush=True)


if __name__ == "__main__":
    main()
