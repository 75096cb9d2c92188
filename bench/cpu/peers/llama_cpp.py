"""llama.cpp through the low-level functions of llama-cpp-python: batches of sequences, its defaults otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cpu.gguf_checkpoint import GGUF_BITS, gguf_file, write_quantized
from bench.cpu.peer import Peer, Runner, Steps, Times, Workload


class _LlamaCpp(Peer):
    packages = ("llama-cpp-python", "gguf")
    modules = ("llama_cpp", "gguf")

    def __init__(self, kind: str) -> None:
        self._kind, self.bits, self.name = kind, GGUF_BITS[kind], f"llama.cpp {kind}"

    def prepare(self, model: Workload) -> None:
        write_quantized(model, self._kind)

    def files(self, model: Workload) -> Sequence[Path]:
        return [gguf_file(model, self._kind)]

    def load(self, model: Workload) -> Runner:
        return Loaded(gguf_file(model, self._kind), model)


class Loaded(Runner):
    def __init__(self, file: Path, model: Workload) -> None:
        import llama_cpp
        import numpy as np

        self._lib, self._np, self._vocab = llama_cpp, np, model.config["vocab_size"]
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # llama.cpp holds on to it
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        if "num_experts" in model.config:  # quantized experts in weights repacked for AMX end in a segmentation fault
            settings.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = model.batch * model.max_len
        params.n_batch = model.max_len
        params.n_seq_max = model.batch
        params.n_threads = params.n_threads_batch = model.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {file}")
        self._batch = llama_cpp.llama_batch_init(model.max_len, 0, 1)

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        lib, steps, total = self._lib, Steps(len(prompts)), len(prompts[0])
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        tokens: list[Any] = [list(p) for p in prompts]
        for i in range(count):
            start = 0 if i == 0 else total + i - 1
            tokens = [[t] for t in self._step(tokens, start)]
            steps.tick()
        return steps.times

    def logits(self, ids: list[int]) -> Any:
        """After each token of one sequence, float32 [len(ids), vocabulary]."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        rows = [self._row(i).copy() for i in self._decode([ids], 0, every=True)]
        return self._np.stack(rows)

    def _step(self, tokens: list[list[int]], start: int) -> list[int]:
        return [int(self._row(i).argmax()) for i in self._decode(tokens, start)]

    def _row(self, place: int) -> Any:
        return self._np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, place), (self._vocab,))

    def _decode(self, tokens: list[list[int]], start: int, every: bool = False) -> list[int]:
        """Compute a batch; the places of its logits: of each sequence's last token, or of every token."""
        batch, places, n = self._batch, [], 0
        for sequence, row in enumerate(tokens):
            for i, token in enumerate(row):
                batch.token[n], batch.pos[n] = token, start + i
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
                batch.logits[n] = every or i == len(row) - 1
                if batch.logits[n]:
                    places.append(n)
                n += 1
        batch.n_tokens = n
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return places


PEERS = tuple(map(_LlamaCpp, GGUF_BITS))
