"""`ArtifactSuccessor`: a thread that waits for an artifact and has it prepared. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from graphllm.program.artifact import Artifact
from graphllm.runtime.programs import Programs

_log = logging.getLogger(__name__)
_LOOK = 0.5  # seconds between two looks at the folder


class ArtifactSuccessor:
    """See `graphllm.engine.step.step_executor.Successor`.

    place: the folder of the artifact.
    present: what runs until then.
    torch: whether this process has torch, and its tensors.
    """

    def __init__(self, place: Path, present: Artifact, torch: bool) -> None:
        self._place, self._present, self._torch = place, present, torch
        self._found: Programs | None = None
        self._ended = threading.Event()

    def begin(self, prepare: Callable[[Artifact], Programs]) -> None:
        """Start the thread."""
        threading.Thread(target=self._wait, args=(prepare,), name="graphllm-successor", daemon=True).start()

    def ready(self) -> Programs | None:
        """The programs, prepared."""
        return self._found

    def close(self) -> None:
        """End the thread, and keep no memory."""
        self._ended.set()
        self._found = None

    def _wait(self, prepare: Callable[[Artifact], Programs]) -> None:
        while not (self._place / "manifest.json").exists():
            if self._ended.wait(_LOOK):
                return
        try:
            found = Artifact.open(self._place)
            found.check_machine()
            other = self._difference(found)
            if other is None:
                self._found = prepare(found)
                if self._ended.is_set():
                    self._found = None
                return
        except Exception as failure:  # the engine goes on as it is
            other = str(failure)
        _log.info("the model's own code is compiled, and taken at the next start (%s)", other)

    def _difference(self, found: Artifact) -> str | None:
        """What the engine that runs does not have; None where it can take the programs."""
        ours, theirs = self._present.program, found.program
        if theirs.torch and not self._torch:
            return "it needs torch"
        if found.weights != self._present.weights:
            return "its weights are packed otherwise"
        same = ours.states == theirs.states and ours.blocks == theirs.blocks and ours.entries == theirs.entries
        graphs = [(g.name, g.task, g.inputs, g.buckets, g.optional) for g in ours.graphs]
        if not same or graphs != [(g.name, g.task, g.inputs, g.buckets, g.optional) for g in theirs.graphs]:
            return "its states or inputs are others"
        return None
