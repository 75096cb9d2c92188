"""Vectors of texts by encoders of random weights: graphllm and sentence-transformers, on a CPU also ONNX Runtime and
llama.cpp, where these are installed.

One text of 32 words, and many of 4 to 200, in turns of all systems, each in a process of its own; the checkpoint is as
sentence-transformers saves one, with a vocabulary of whole words. A further system is a class with ``vectors`` in
SYSTEMS. OMP_NUM_THREADS says the threads of all.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Case, worker_command, worker_environment
from bench.process import Commands, Process

CASES = [
    ("pooling", {"shape": "minilm", "dtype": "float32", "target": "cpu", "texts": 256, "rounds": 3}),
    ("pooling_bf16", {"shape": "minilm", "dtype": "bfloat16", "target": "cpu", "texts": 256, "rounds": 3}),
    ("pooling_bert", {"shape": "bert-base", "dtype": "float32", "target": "cpu", "texts": 256, "rounds": 3}),
    ("pooling_bert_bf16", {"shape": "bert-base", "dtype": "bfloat16", "target": "cpu", "texts": 256, "rounds": 3}),
    ("pooling_bert_gpu", {"shape": "bert-base", "dtype": "bfloat16", "target": "cuda", "texts": 256, "rounds": 3}),
    ("pooling_xlmr_gpu", {"shape": "xlm-r-large", "dtype": "bfloat16", "target": "cuda", "texts": 256, "rounds": 3}),
]
HELP = {"shape": "minilm, bert-base or xlm-r-large", "dtype": "float32 or bfloat16", "texts": "texts of the many"}
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
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
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


SYSTEMS = ("graphllm", "sentence-transformers", "onnxruntime", "llama.cpp")
PACKAGES = ("transformers", "sentence-transformers", "onnxruntime", "llama-cpp-python")


def system_of(name: str) -> Any:
    """The class of a system, in its own process."""
    from bench.cpu.encoder_peers import LlamaCpp, OnnxRuntime

    return dict(zip(SYSTEMS, (Ours, SentenceTransformers, OnnxRuntime, LlamaCpp), strict=True))[name]


def work(commands: Commands, name: str, folder: str, dtype: str, device: str) -> None:
    """A system in a process of its own. It answers each command (how many texts, seed, how often) with the
    seconds of each time; the vectors of the last go to the file that the command names."""
    import numpy as np

    try:
        system = system_of(name)(Path(folder), dtype, device)
    except ImportError as missing:
        commands.answer(f"not here: {missing}")
        return
    system.vectors(texts_of(1, 0))
    commands.answer("ready")
    for count, seed, repeats, file in commands:
        times = []
        for i in range(repeats):
            given = texts_of(count, seed + i)
            begun = time.perf_counter()
            vectors = system.vectors(given)
            times.append(time.perf_counter() - begun)
        np.save(file, vectors)
        commands.answer(times)
    commands.answer(None)


class Worker:
    """A process that does `work`. Systems in one process would take each other's threads: OpenMP's wait without
    spinning where there are more of them than CPUs."""

    def __init__(self, name: str, folder: Path, dtype: str, device: str) -> None:
        begun = time.perf_counter()
        self._process = Process(worker_command("serve", work, name, folder, dtype, device), worker_environment())
        self._file = folder / f"{name}.npy"
        self.answer = self._process.started()
        self.start = time.perf_counter() - begun

    def run(self, count: int, seed: int, repeats: int) -> list[float]:
        """Seconds of each time."""
        return list(self._process.ask((count, seed, repeats, str(self._file))))

    def vectors(self) -> Any:
        """The last ones."""
        import numpy as np

        return np.load(self._file)

    def close(self) -> None:
        """End it."""
        with self._process:
            if self.answer == "ready":
                self._process.end()


def compare(folder: Path, dtype: str, device: str, texts: int, rounds: int) -> dict[str, Any]:
    """Medians by system: milliseconds of one text, texts a second of many, seconds from a process's start to its first
    vector; in how many turns it was slower than ours; and how close its vectors are to ours."""
    import numpy as np

    found: dict[str, Any] = {}
    running: dict[str, Worker] = {}
    for name in SYSTEMS:
        worker = Worker(name, folder, dtype, device)
        if worker.answer != "ready":
            found[name] = worker.answer
            continue
        worker.close()  # it has compiled, exported or converted what it starts with now
        starts = []
        for _ in range(3):
            if name in running:
                running[name].close()
            running[name] = Worker(name, folder, dtype, device)
            starts.append(running[name].start)
        found[name] = {"start s": statistics.median(starts)}
        running[name].run(texts, 0, 1)
        running[name].run(1, 0, 10)
    times: dict[tuple[str, int], list[float]] = {}
    least: dict[str, float] = {}
    for turn in range(rounds):
        for count, repeats in ((1, 20), (texts, 1)):
            for name, worker in running.items():
                times.setdefault((name, count), []).append(statistics.median(worker.run(count, 1 + turn * 20, repeats)))
            ours = running["graphllm"].vectors()
            for name, worker in running.items():
                least[name] = min(least.get(name, 1.0), float(np.min(np.sum(ours * worker.vectors(), -1))))
    for name, worker in running.items():
        worker.close()
        one, many = times[name, 1], times[name, texts]
        found[name]["one text ms"] = 1e3 * statistics.median(one)
        found[name][f"{texts} texts, texts/s"] = texts / statistics.median(many)
        if name != "graphllm":
            for what, count in (("one text", 1), (f"{texts} texts", texts)):
                pairs = list(zip(times["graphllm", count], times[name, count], strict=True))
                found[name][f"turns slower, {what}"] = f"{sum(a < b for a, b in pairs)} of {len(pairs)}"
            found[name]["least cosine"] = least[name]
    return found


def run(case: Case) -> dict[str, Any]:
    """A row for each system."""
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), case.shape)
        return compare(Path(place), case.dtype, case.target, case.texts, case.rounds)
