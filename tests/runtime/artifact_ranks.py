"""An artifact without an engine in several processes, one rank each: steps go in, tokens and logits come out. The
launcher, and what a rank's process does.

Messages are msgpack over pipes, each behind its length. Every rank gets every step and answers; rank 0's answer holds
the results.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from graphllm.config import ConfigError
from graphllm.runtime.memory.staging import Sampling, StepInput
from graphllm.runtime.ranks.rank_messages import Array, packed, unpacked


class Step(msgspec.Struct):
    """A `StepInput` on its way."""

    tokens: int
    sequences: int
    rows: int
    query_len: int
    arrays: dict[str, Array]


class Answer(msgspec.Struct):
    """What a rank says: arrays by name, or the text of its error."""

    arrays: dict[str, Array] = {}
    error: str | None = None


class Ranks:
    """An artifact in ``degree`` processes. `close` ends them.

    artifact: verified. checkpoint: its folder. num_blocks: blocks of each rank's cache. threads: of each rank's
    kernels. Raises ConfigError with a rank's own words when it cannot start.
    """

    def __init__(self, artifact: Path, checkpoint: Path, degree: int, num_blocks: int, threads: int = 1) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="graphllm-ranks-")
        words = [str(artifact), str(checkpoint), str(Path(self._scratch.name) / "meeting"), str(degree)]
        words += [str(num_blocks), str(threads)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, *words, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(degree)
        ]
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def run(self, step: StepInput) -> dict[str, np.ndarray]:
        """Run a step on every rank: "tokens" [R] and "logits" [R, V], float32. Raises ConfigError when a rank fails."""
        arrays = packed(step.arrays)
        message = msgspec.msgpack.encode(Step(step.tokens, step.sequences, step.rows, step.query_len, arrays))
        for process in self._processes:
            assert process.stdin is not None
            _send(process.stdin, message)
        return unpacked(self._answers()[0].arrays)

    def close(self) -> None:
        """End the processes: a rank whose input ends leaves by itself."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._scratch.cleanup()

    def _answers(self) -> list[Answer]:
        """One of every rank. Raises ConfigError for the first error."""
        found = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            data = _receive(process.stdout)
            if data is None:
                raise ConfigError(f"rank {rank} ended with code {process.wait(300)}; what it printed says why")
            answer = msgspec.msgpack.decode(data, type=Answer)
            if answer.error is not None:
                raise ConfigError(f"rank {rank}: {answer.error}")
            found.append(answer)
        return found


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message, None when there is none any more."""
    head = pipe.read(8)
    return pipe.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else None


def _serve(args: argparse.Namespace, answers: IO[bytes]) -> None:
    """A rank's life: load its share, then a step for each message."""
    import torch

    from graphllm.program.artifact import Artifact
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.ranks.groups import Meeting, joined
    from graphllm.weights.checkpoint.checkpoint import Checkpoint
    from graphllm.weights.loading.loader import load_weights
    from graphllm.weights.plan.plan import WeightPlan

    def answer(arrays: Mapping[str, np.ndarray]) -> None:
        _send(answers, msgspec.msgpack.encode(Answer(packed(arrays))))

    torch.set_num_threads(args.threads)
    artifact = Artifact.open(args.artifact)
    device = torch.device(artifact.device)
    plan = WeightPlan.from_json((args.artifact / "weights.json").read_text())
    checkpoint = Checkpoint.open(args.checkpoint)  # what is wrong with it every rank says before it meets the others
    with joined(args.rank, args.degree, Meeting(f"file://{args.meeting}"), device):
        torch.distributed.all_reduce(torch.zeros(1, device=device))  # one that fails leaves nobody half joined
        weights = load_weights(plan, checkpoint, device, rank=args.rank)
        executor = Executor(artifact, weights, args.num_blocks, threads=args.threads)
        answer({})
        while (message := _receive(sys.stdin.buffer)) is not None:
            step = msgspec.msgpack.decode(message, type=Step)
            arrays = unpacked(step.arrays)
            handle = executor.start(StepInput(step.tokens, step.sequences, step.rows, step.query_len, arrays), "full")
            executor.sample(handle, Sampling())  # the plain program has no logits of all tokens
            done = handle.wait()
            assert done.logits is not None
            results = {"tokens": done.tokens, "logits": done.logits.float().cpu().numpy()}
            answer(results if args.rank == 0 else {})
        executor.close()


def main() -> None:
    """One rank's process; what it prints goes to standard error, standard output is for answers."""
    parser = argparse.ArgumentParser()
    for name, kind in (("artifact", Path), ("checkpoint", Path), ("meeting", Path), ("degree", int)):
        parser.add_argument(name, type=kind)
    for name in ("num_blocks", "threads", "rank"):
        parser.add_argument(name, type=int)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    try:
        _serve(parser.parse_args(), answers)
    except ConfigError as refused:
        _send(answers, msgspec.msgpack.encode(Answer(error=str(refused))))


if __name__ == "__main__":
    main()
