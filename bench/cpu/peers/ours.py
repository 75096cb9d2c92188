"""graphllm, on the three ways from its kernels to a user: the executor by itself, `LLM`, and the HTTP server; and `LLM`
with the GGUF files that llama.cpp reads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from bench.cpu.gguf_checkpoint import GGUF_BITS, gguf_file, write_quantized
from bench.cpu.peer import Peer, Runner, Steps, Times, Workload

Way = Literal["LLM", "executor", "HTTP server"]
_FORMATS: dict[int, str | None] = {16: None, 8: "int8", 4: "int4"}


class _Ours(Peer):
    packages = ("graphllm", "torch")
    modules = ("graphllm",)

    def __init__(self, bits: int, way: Way) -> None:
        self.bits, self.way = bits, way
        self._quantize = _FORMATS[bits]
        kind = self._quantize or "bf16"
        self.name = f"graphllm {kind}" if way == "LLM" else f"graphllm {kind}, {way}"

    def prepare(self, model: Workload) -> None:
        quantize = ["--quantization", self._quantize] if self._quantize else []
        _compile(model, model.checkpoint, self._artifact(model), "--bake-weights", *quantize)

    def files(self, model: Workload) -> Sequence[Path]:
        return [self._artifact(model), model.checkpoint / "tokenizer.json"]

    def load(self, model: Workload) -> Runner:
        return _RUNNERS[self.way](model, self._artifact(model))

    def _artifact(self, model: Workload) -> Path:
        return _artifact(model, self._quantize or "bf16")


class _OursGguf(Peer):
    """The weights are read from the GGUF file at every start."""

    packages = ("graphllm", "torch", "gguf")
    modules = ("graphllm", "llama_cpp", "gguf")  # llama.cpp makes the files

    def __init__(self, kind: str) -> None:
        self._kind, self.bits, self.name = kind, GGUF_BITS[kind], f"graphllm {kind}"

    def prepare(self, model: Workload) -> None:
        write_quantized(model, self._kind)
        _compile(model, gguf_file(model, self._kind), _artifact(model, self._kind))

    def files(self, model: Workload) -> Sequence[Path]:
        return [_artifact(model, self._kind), gguf_file(model, self._kind)]

    def load(self, model: Workload) -> Runner:
        return InLlm(model._replace(checkpoint=gguf_file(model, self._kind)), _artifact(model, self._kind))


def _artifact(model: Workload, kind: str) -> Path:
    from graphllm.program.artifact import source_digest

    return model.work / f"graphllm-{kind}-{source_digest()}"


def _compile(model: Workload, source: Path, folder: Path, *more: str) -> None:
    if (folder / "manifest.json").exists():
        return
    command = [sys.executable, "-m", "graphllm.cli", "compile", str(source), "--target", "cpu",
               "--max-model-len", str(model.max_len), "--max-num-seqs", str(model.batch),
               "--max-num-batched-tokens", str(model.max_len), "-o", str(folder), *more]  # fmt: skip
    subprocess.run(command, check=True)


def _open(model: Workload, artifact: Path | None, **more: Any) -> Any:
    from graphllm.config import EngineArgs
    from graphllm.loading.artifact.model import resolve_model

    given = more if artifact is None else {"artifact": artifact, **more}
    return resolve_model(EngineArgs(model.checkpoint, target="cpu", **given))


class _Stamped:
    """A core that notes when each request's tokens came out of a step."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.times: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def abort(self, ids: Iterable[str]) -> None:
        self._core.abort(ids)

    def step(self) -> list[Any]:
        news: list[Any] = self._core.step()
        now = time.perf_counter()
        for update in news:
            self.times.setdefault(update.id, []).extend([now] * len(update.tokens))
        return news


class InLlm(Runner):
    def __init__(self, model: Workload, artifact: Path | None, **more: Any) -> None:
        """artifact: None takes the cache's, with more settings."""
        resolved = _open(model, artifact, **more)
        from graphllm.entrypoints.llm import LLM
        from graphllm.loading.core.load import load_core

        core: Any = _Stamped(load_core(resolved.config))
        self._core, self.llm = core, LLM.from_core(core, resolved.tokenizer)

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        from graphllm.config.requests.sampling_params import SamplingParams

        self._core.times.clear()
        self.llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        return list(self._core.times.values())

    def close(self) -> None:
        self.llm.close()


class _Executor(Runner):
    """Batches made by hand, each step awaited: the kernels' speed."""

    def __init__(self, model: Workload, artifact: Path) -> None:
        resolved = _open(model, artifact)
        from graphllm.program.artifact import Artifact
        from graphllm.runtime.executor import Executor
        from graphllm.runtime.stream import alone
        from graphllm.weights.loading import baked

        opened = Artifact.open(Path(resolved.config.load.artifact))
        self._width = -(-model.max_len // opened.config.block_size)
        with alone():  # threads of this one would keep the kernels' from spinning
            blocks = model.batch * self._width + 1
            self._executor = Executor(opened, baked.open_weights(artifact), blocks, threads=model.threads)

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        steps, rows, start = Steps(len(prompts)), [list(p) for p in prompts], 0
        for _ in range(count):
            tokens = self._step(rows, start)
            steps.tick()
            start += len(rows[0])
            rows = [[t] for t in tokens]
        return steps.times

    def _step(self, rows: list[list[int]], start: int) -> list[int]:
        import numpy as np

        from graphllm.runtime.memory.staging import ragged

        blocks = np.arange(1, len(rows) * self._width + 1, dtype=np.int32)
        step = ragged(rows, [start] * len(rows), [blocks.reshape(len(rows), self._width)])
        found: list[int] = self._executor.run(step).tokens.tolist()
        return found

    def close(self) -> None:
        self._executor.close()


class _Server(Runner):
    """`graphllm serve`, asked by streaming clients of this process."""

    def __init__(self, model: Workload, artifact: Path) -> None:
        from graphllm.cli.bench.server import ServerProcess

        self._server = ServerProcess(
            [str(model.checkpoint), "--target", "cpu", "--artifact", str(artifact), "--log-level", "error"]
        )
        self.begun = self._server.started
        try:
            self._server.wait_for("/health/ready", timeout=120)
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        return asyncio.run(self._all(prompts, count))

    async def _all(self, prompts: Sequence[list[int]], count: int) -> Times:
        from graphllm.cli.bench.client import HttpClient

        client = HttpClient(self._server.url)
        common = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
                  "stream_options": {"include_usage": True}}  # fmt: skip
        bodies = [json.dumps({"prompt": prompt, **common}).encode() for prompt in prompts]
        found = await asyncio.gather(*(client.stream("/v1/completions", body) for body in bodies))
        client.close()
        for timeline in found:
            if timeline.error or timeline.output_tokens != count:
                raise RuntimeError(f"{timeline.output_tokens} of {count} tokens: {timeline.error}")
        return [_by_token(timeline.pieces, count) for timeline in found]

    def close(self) -> None:
        self._server.__exit__()


def _by_token(pieces: list[float], count: int) -> list[float]:
    """A time for each token, where several may have come in one piece: the pieces' times, evenly spread."""
    if not pieces:
        raise RuntimeError("a stream without a piece of output")
    return [pieces[min(i * len(pieces) // count, len(pieces) - 1)] for i in range(count - 1)] + [pieces[-1]]


_RUNNERS: dict[Way, Any] = {"LLM": InLlm, "executor": _Executor, "HTTP server": _Server}

PEERS = (
    *(_Ours(bits, way) for bits in _FORMATS for way in _RUNNERS),
    *(_OursGguf(kind) for kind, bits in GGUF_BITS.items() if bits < 16),
)
