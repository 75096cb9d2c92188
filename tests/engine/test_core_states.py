"""The engine core over an executor that only records: what it is told around steps, and what verification gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from graphllm.config import Bucket, ConfigError, SchedulerConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.part import CoreSetup
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.program.schema import CacheGroup, CacheLayout
from graphllm.program.specs import InputSpec
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.items import Encode
from graphllm.runtime.commands.states import ReadBlocks, WriteBlocks, WriteEntry, WriteSnapshots
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import StepInput
from graphllm.runtime.step_handle import StepResult
from tests.engine.harness import finish, request
from tests.engine.simulation import item

LAYOUT = CacheLayout((CacheGroup("full", 0, 4),), 40, recurrent=True, num_snapshots=4, item_tokens=8, query_lens=(3,))


class Recorder:
    """An executor whose tokens count up from 100 in each slot; of three verified ones it keeps two. log: its calls."""

    def __init__(self, layout: CacheLayout = LAYOUT) -> None:
        self.layout = layout
        self.max_num_seqs, self.max_rows, self.max_num_batched_tokens = 4, 12, 32
        self.vocab, self.max_logprobs, self.max_logit_bias = 500, 20, 16
        self.adapted, self.max_lora_rank = (), 0
        self.buckets, self.device = [Bucket("mixed", 1, 32)], SimpleNamespace(type="cpu")
        self.shareable = self.device_drafts = True
        self.task, self.inputs, self.vector = "generate", {}, ("R", 0)
        self.item_input = InputSpec("rows", ("T", 2), "float32", provider="item"), 32
        self.log: list[tuple[Any, ...]] = []
        self.blocks: dict[int, bytes] = {}
        self.snapshots: dict[int, bytes] = {}
        self.newest = [99] * 4
        self.block_bytes, self.snapshot_bytes, self.outputs = [8], [8], ()

    def start(self, step: StepInput, program: str, drafts: bool = False) -> Any:
        q, slots, given = max(1, step.query_len), step.arrays["row_slots"], step.arrays
        pending = given["pending"].astype(bool) if "pending" in given and given["pending"].any() else None
        self.log.append(("step", q, given["token_ids"].tolist(), given["positions"].tolist(), pending))
        tokens = np.zeros(len(slots), dtype=np.int32)
        for row, slot in enumerate(slots.tolist()):
            tokens[row] = self.newest[slot] + 1 + row % q
        for slot in set(slots.tolist()):
            self.newest[slot] += 1 if q == 1 else 2
        kept = np.full(step.sequences, min(q, 2), dtype=np.int32)
        known = {"drafts": np.tile(np.array([[0, -1]], dtype=np.int32), (5, 1))} if drafts else {}
        result = StepResult({"tokens": tokens, "kept": kept, **known}, {}, None)
        return SimpleNamespace(wait=lambda: result, size=Size(self.buckets[0], 32, 4, 4))

    def sample(self, *given: Any) -> None:
        """The tokens are those of `start`."""

    def do(self, command: Command) -> None:
        match command:
            case WriteBlocks(blocks, data):
                self.blocks |= dict(zip(blocks, data, strict=True))
            case WriteSnapshots(snapshots, data):
                self.snapshots |= dict(zip(snapshots, data, strict=True))
            case WriteEntry():
                pass
            case Encode(data, length, start):
                self.log.append(("encode", data.tolist(), length, start))
            case _:
                self.log.append((type(command).__name__, *msgspec.structs.astuple(command)))

    def ask(self, query: Query) -> list[Answered]:
        kind, numbers = ("block", query.blocks) if isinstance(query, ReadBlocks) else ("snapshot", query.snapshots)
        return [Answered([f"{kind} {n}".encode() for n in numbers])]

    def close(self) -> None:
        pass


def _core(executor: Recorder, **options: Any) -> EngineCore:
    return EngineCore(executor, 64, SchedulerConfig(cache_secret="s", **options))  # type: ignore[arg-type]


def _params(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **fields)


def test_states_around_steps() -> None:
    """Zeroed or loaded before a request's first step, saved after the one that ends at the last boundary."""
    executor = Recorder()
    core = _core(executor)
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    image = msgspec.structs.replace(item("a", 0, 3), data=rows.tobytes(), dtype="float32", shape=rows.shape)
    wanted = [request(i, range(10), _params(1), items=[image]) for i in "xy"]
    for one in wanted:
        finish(core, [one])
    names = [(name, *given) if name != "step" else (name, given[1]) for name, *given in executor.log]
    assert names == [
        ("encode", rows.tolist(), 3, 0), ("ResetSlots", [0]), ("step", list(range(8))), ("SaveSnapshots", [(0, 0)]),
        ("step", [8, 9]),
        ("LoadSnapshots", [(0, 0)]), ("step", [8, 9]),
    ]  # fmt: skip
    core.close()


def test_verified_tokens() -> None:
    """Each step but the first verifies, on the device's drafts; the host learns a step later what was kept."""
    executor = Recorder(LAYOUT._replace(recurrent=False))
    core = _core(executor)
    found = finish(core, [request("x", [1, 2, 3], _params(9))])["x"]
    assert found.tokens == list(range(100, 109))
    steps = [given for name, *given in executor.log if name == "step"]
    assert [s[0] for s in steps[:3]] == [1, 3, 3]
    assert [s[1] for s in steps[:3]] == [[1, 2, 3], [-1, -1, -1], [-1, -1, -1]]
    assert [s[2] for s in steps[:3]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [None if s[3] is None else s[3].tolist() for s in steps[:3]] == [None, None, [True]]
    core.close()


@pytest.mark.parametrize(
    ("fields", "processors", "lengths"),
    [
        ({"min_tokens": 3, "stop_token_ids": (7,)}, (), {1, 3}),
        ({"presence_penalty": 1}, (), {1, 3}),
        ({}, (lambda logits, rows: None,), {1}),  # a user's function is told of one row of each request
    ],
)
def test_who_is_verified(fields: dict[str, Any], processors: tuple[Any, ...], lengths: set[int]) -> None:
    executor = Recorder(LAYOUT._replace(recurrent=False))
    core = EngineCore(executor, 64, SchedulerConfig(), CoreSetup(processors=processors))  # type: ignore[arg-type]
    core.add(request("x", [1, 2, 3], _params(6, **fields)))
    while core.unfinished:
        core.step()
    assert {given[0] for name, *given in executor.log if name == "step"} == lengths
    core.close()


def test_a_prefix_goes_to_another_core() -> None:
    first, second = Recorder(), Recorder()
    cores = [_core(first), _core(second)]
    one = request("x", range(10), _params(1))
    finish(cores[0], [one])
    entries = cores[0].part(Snapshots).export_cache(one)
    assert [(e.group, e.data.split()[0]) for e in entries] == [(0, b"block"), (0, b"block"), (-1, b"snapshot")]
    assert cores[1].part(Snapshots).import_cache(entries) == 3
    assert cores[1].part(Snapshots).import_cache(entries) == 0
    assert [*second.blocks.values(), *second.snapshots.values()] == [e.data for e in entries]
    assert finish(cores[1], [one])["x"].cached == 8
    assert cores[1].reset_prefix_cache()
    assert cores[1].part(Snapshots).export_cache(one) == []
    with pytest.raises(ConfigError, match="there is no cache group 1 here"):
        cores[1].part(Snapshots).import_cache([entries[0].__class__(1, b"", b"")])
    for core in cores:
        core.close()
