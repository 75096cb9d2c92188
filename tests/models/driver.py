"""Compiles a Hugging Face checkpoint folder and decodes greedily with the executor: what parity tests compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from graphllm.config import Bucket
from graphllm.loading.checkpoint.source import open_source
from graphllm.runtime.commands.states import ResetSlots
from graphllm.runtime.memory.staging import ragged, stack_tables
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from tests.artifacts import artifact_of, open_executor

BLOCK = 16
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, 8), Bucket("mixed", 2, 512))


class Runner:
    """Decodes with an executor, or with what stands in for one."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def _run(self, new: Sequence[Sequence[int]], done: Sequence[int], tables: Sequence[Any]) -> Any:
        """A step of sequences in the slots 0, 1 and so on; the recurrent states of those that begin are zeros."""
        step = ragged(new, done, tables)
        step.arrays["slots"] = np.arange(len(new), dtype=np.int32)
        if self.executor.layout.recurrent and (fresh := [s for s, d in enumerate(done) if not d]):
            self.executor.do(ResetSlots(fresh))
        return self.executor.run(step)

    def _tables(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Blocks of every cache group, for each sequence, in shuffled order."""
        layout = self.executor.layout
        order = torch.randperm(layout.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        return [[[order.pop() for _ in range(-(-n // group.block_size))] for n in lengths] for group in layout.groups]

    def forced(self, sequences: Sequence[Sequence[int]], n_tokens: int) -> list[Tensor]:
        """The logits [n_tokens, V] after each of the last tokens of every sequence, the first from its prefill and the
        others from decode steps of all sequences together."""
        tables = self._tables([len(s) for s in sequences])
        count = len(sequences)
        done = [0] * count
        rows: list[list[Tensor]] = [[] for _ in sequences]
        for step in range(n_tokens):
            ends = [len(s) - n_tokens + 1 + step for s in sequences]
            new = [s[d:e] for s, d, e in zip(sequences, done, ends, strict=True)]
            logits = self._run(new, done, [stack_tables(group) for group in tables]).logits[:count].float().cpu()
            for row, found in zip(rows, logits, strict=True):
                row.append(found.clone())
            done = ends
        return [torch.stack(row) for row in rows]

    def chunked(self, prompt: Sequence[int], chunk: int) -> Tensor:
        """The logits [V] after a prompt that is computed so many tokens at a time."""
        tables = [stack_tables(table) for table in self._tables([len(prompt)])]
        for start in range(0, len(prompt), chunk):
            result = self._run([prompt[start : start + chunk]], [start], tables)
        return result.logits[0].float().cpu().clone()

    def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> tuple[list[Tensor], list[list[int]]]:
        """Greedy decoding of all prompts as one ragged batch.

        Returns, for each prompt, the logits [V] after its last token, and the n_tokens drawn ones.
        """
        tables = self._tables([len(p) + n_tokens for p in prompts])
        new, done = [list(p) for p in prompts], [0] * len(prompts)
        prefill: list[Tensor] = []
        tokens: list[list[int]] = [[] for _ in prompts]
        for _ in range(n_tokens):
            result = self._run(new, done, [stack_tables(group) for group in tables])
            drawn = result.tokens.tolist()
            prefill = prefill or list(result.logits[: len(prompts)].float().cpu().clone())
            done = [d + len(n) for d, n in zip(done, new, strict=True)]
            new = [[t] for t in drawn]
            for row, token in zip(tokens, drawn, strict=True):
                row.append(token)
        return prefill, tokens


class Driver(Runner):
    """A compiled checkpoint with its executor. settings: further ones of `EngineArgs`. opened: what runs the artifact,
    of its folder and the checkpoint, in place of an executor in this process. jobs: processes that compile, where
    nothing is tuned."""

    def __init__(
        self,
        folder: Path,
        backend: Literal["eager", "inductor"],
        dtype: Literal["float32", "bfloat16"] = "float32",
        target: Literal["cpu", "cuda"] = "cpu",
        tune: bool = False,
        settings: Mapping[str, Any] = {},
        opened: Callable[[Path, Checkpoint], Any] | None = None,
        jobs: int = 1,
    ) -> None:
        source = open_source(folder)
        assert source.checkpoint is not None
        self.place = place = artifact_of(
            source, {"max_model_len": 512}, target=target, backend=backend, dtype=dtype, buckets=BUCKETS,
            max_num_seqs=8, max_num_batched_tokens=512, block_size=BLOCK, tune=tune, jobs=0 if tune else jobs,
            **settings,
        )  # fmt: skip
        if opened is not None:
            self.executor = opened(place, source.checkpoint)
        else:
            self.executor = open_executor(source, place, 512, target)
