"""Figures of vLLM 0.26 on the same kind of GPU, measured by this project in other runs."""

# By shape: rows of the case `gpu_table`, in its units.
VLLM: dict[str, dict[str, float]] = {
    "llama3.1-8b": {"decode 1": 4.93, "decode 32": 5.55, "decode 64": 6.15, "decode 128": 7.42, "decode 256": 11.44,
                    "TTFT 8192": 219.9, "prefill 32x1024": 42796, "mixed": 10879, "startup": 30.8},
    "qwen3-0.6b": {"decode 1": 2.31, "decode 64": 2.96, "decode 256": 8.09, "mixed": 18060},
    "qwen3-30b-a3b": {"decode 1": 4.12, "decode 32": 15.8, "decode 128": 18.9, "TTFT 8192": 156.6},
    "llama3.1-8b tp2": {"decode 1": 3.47, "decode 32": 3.91, "decode 64": 4.13, "decode 128": 4.99, "decode 256": 7.04,
                        "TTFT 8192": 127.6, "mixed": 19960},
    "llama3-70b tp2": {"decode 1": 20.6, "decode 64": 23.8, "TTFT 8192": 1026},
}  # fmt: skip


def beat(shape: str, row: str, value: float, *, more_is_better: bool = False) -> dict[str, float]:
    """Columns of a row: vLLM's figure and how many times as fast this value is; none where it has none."""
    peer = VLLM.get(shape, {}).get(row)
    if peer is None:
        return {}
    return {"vLLM 0.26": peer, "speed-up": round(value / peer if more_is_better else peer / value, 2)}
