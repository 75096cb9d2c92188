"""Vectors of texts by encoders of random weights, beside sentence-transformers where that is installed.

    python -m bench pooling [--shape minilm] [--dtype float32] [--texts 256] [--device cpu] [--out FILE.json]

One text of 32 words, and many of 4 to 200, in turns of all systems; the checkpoint is as sentence-transformers saves
one, with a vocabulary of whole words. A further system is a class with ``vectors`` in SYSTEMS. Threads are those of
OMP_NUM_THREADS, for all.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = 30_000
SHAPES: dict[str, dict[str, int]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "xlm-r-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


def write(folder: Path, shape: str) -> None:
    """A checkpoint with mean pooling, its tokenizer and sentence-transformers' files."""
    import torch
    import transformers

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    config = transformers.BertConfig(vocab_size=len(special) + WORDS, **SHAPES[shape])
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(special + [f"w{i}" for i in range(WORDS)]))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    told = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
    (folder / "2_Normalize").mkdir()


def texts_of(count: int, seed: int) -> list[str]:
    """One of 32 words, or many of 4 to 200, shorter ones more often."""
    draw = random.Random(seed)
    lengths = [32] if count == 1 else [round(4 * 50 ** draw.random()) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(n)) for n in lengths]


class Ours:
    """graphllm, compiled for the machine."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        from graphllm import LLM

        self._llm = LLM(folder, dtype=dtype, target=device)

    def vectors(self, texts: Sequence[str]) -> Any:
        """[texts, D] float32."""
        import numpy as np

        return np.array([o.outputs.embedding for o in self._llm.embed(list(texts), use_tqdm=False)])


class SentenceTransformers:
    """The library of that name, with its own batches of 32 sorted texts."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        chosen = {"torch_dtype": getattr(torch, dtype)}
        self._model = SentenceTransformer(str(folder), device=device, model_kwargs=chosen)

    def vectors(self, texts: Sequence[str]) -> Any:
        """[texts, D] float32."""
        return self._model.encode(list(texts), show_progress_bar=False)


SYSTEMS = {"graphllm": Ours, "sentence-transformers": SentenceTransformers}


def compare(folder: Path, dtype: str, device: str, texts: int, rounds: int) -> dict[str, Any]:
    """Medians by system: milliseconds of one text, texts a second of many, seconds to the first vector; and how close
    the vectors of the systems are."""
    import numpy as np

    running: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, system in SYSTEMS.items():
        begun = time.perf_counter()
        try:
            running[name] = system(folder, dtype, device)
        except ImportError as missing:
            found[name] = f"not installed: {missing}"
            continue
        running[name].vectors(texts_of(1, 0))
        found[name] = {"start s": time.perf_counter() - begun}
        running[name].vectors(texts_of(texts, 0))
    times: dict[tuple[str, int], list[float]] = {}
    last: dict[str, Any] = {}
    for turn in range(rounds):
        for count, repeats in ((1, 10), (texts, 1)):
            for name, system in running.items():
                for i in range(repeats):
                    given = texts_of(count, 1 + turn * 10 + i)
                    begun = time.perf_counter()
                    last[name] = system.vectors(given)
                    times.setdefault((name, count), []).append(time.perf_counter() - begun)
    for name in running:
        found[name]["one text ms"] = 1e3 * statistics.median(times[name, 1])
        found[name][f"{texts} texts, texts/s"] = texts / statistics.median(times[name, texts])
    if len(last) > 1:
        one, other = list(last.values())[:2]
        found["least cosine"] = float(np.min(np.sum(one * other, -1)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), args.shape)
        rows = compare(Path(place), args.dtype, args.device, args.texts, args.rounds)
    found = {"command": " ".join(sys.argv), "machine": platform.processor() or platform.machine(), **rows}
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
