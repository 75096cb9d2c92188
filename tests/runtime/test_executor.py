"""The executor: staging, choice of bucket, and a compiled program that equals the eager one on any ragged batch."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.config import Bucket, CompileConfig, ConfigError, SchedulerConfig, Target
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.requests.request import EngineRequest
from graphllm.ir.model import Graph, Model
from graphllm.loading.checkpoint.source import open_source
from graphllm.loading.core.loaders.make_core import warm_up_host
from graphllm.program.artifact import Artifact
from graphllm.program.schema import CacheGroup
from graphllm.program.specs import InputSpec
from graphllm.runtime.executor import Executor
from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import Staging, StepInput, ragged, stack_tables
from graphllm.runtime.memory.torch_memory import TorchMemory
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan
from tests.tensor_memory import storages, storages_since
from tests.tiers import draws

BLOCKS = 64


class Part(NamedTuple):
    """One sequence's part of a batch: its new tokens, how many came before, and its blocks."""

    tokens: list[int]
    start: int
    blocks: list[int]


def _batch(parts: list[Part]) -> StepInput:
    return ragged([p.tokens for p in parts], [p.start for p in parts], [stack_tables([p.blocks for p in parts])])


def _open(folder: Path, checkpoint: Path) -> Executor:
    plan = WeightPlan.from_json((folder / "weights.json").read_text())
    source = open_source(checkpoint).checkpoint
    assert source is not None
    return Executor(Artifact.open(folder), load_weights(plan, source), BLOCKS)


@pytest.fixture(scope="module")
def executors(eager_artifact: Path, compiled_artifact: Path, checkpoint: Path) -> tuple[Executor, Executor]:
    return _open(eager_artifact, checkpoint), _open(compiled_artifact, checkpoint)


def _agree(executors: tuple[Executor, Executor], parts: list[Part]) -> np.ndarray:
    """Run a batch on both and compare; the eager tokens."""
    step = _batch(parts)
    found = []
    for executor in executors:
        result = executor.run(step)
        found.append((result.logits.clone(), result.tokens))
    (eager, eager_tokens), (compiled, compiled_tokens) = found
    assert torch.isfinite(eager).all()
    error = float((eager - compiled).norm() / eager.norm())
    assert error < 1e-5  # float32; measured about 3e-7
    best = eager.topk(2).values
    clear = (best[:, 0] - best[:, 1] > 1e-3).numpy()
    assert (eager_tokens[clear] == compiled_tokens[clear]).all()
    assert (eager_tokens == eager.argmax(-1).numpy()).all()
    return eager_tokens


@pytest.mark.parametrize("seed", range(3))
def test_compiled_equals_eager_on_ragged_batches(executors: tuple[Executor, Executor], seed: int) -> None:
    """A random walk: sequences come, are prefilled in chunks, decode together or alone, and go."""
    rng = random.Random(seed)
    limit, seqs = executors[0].max_num_batched_tokens, executors[0].max_num_seqs
    block_size = executors[0].layout.groups[0].block_size
    free = list(range(BLOCKS))
    rng.shuffle(free)
    live: list[tuple[list[int], int, list[int]]] = []  # (known tokens, computed, blocks)
    used = set()
    for _ in range(40):
        if len(live) < seqs and rng.random() < 0.5:
            prompt = [rng.randrange(executors[0].vocab) for _ in range(rng.choice([1, 2, 9, 31, 40]))]
            live.append((prompt, 0, [free.pop() for _ in range(12)]))
        if not live:
            continue
        budget, parts, chosen = limit, [], []
        for i in rng.sample(range(len(live)), rng.randint(1, len(live))):
            known, computed, blocks = live[i]
            count = min(rng.randint(1, len(known) - computed), budget)
            if count:
                parts.append(Part(known[computed : computed + count], computed, blocks[: -(-len(known) // block_size)]))
                chosen.append(i)
                budget -= count
        used.add(executors[1].start(_batch(parts)).size.bucket.name)
        for i, part, token in zip(chosen, parts, _agree(executors, parts).tolist(), strict=True):
            known, computed, blocks = live[i]
            computed += len(part.tokens)
            live[i] = ([*known, token] if computed == len(known) else known, computed, blocks)
        for gone in [s for s in live if len(s[0]) > 90 or rng.random() < 0.05]:
            live = [s for s in live if s is not gone]
            free += gone[2]
    assert {"decode-1", "decode-2-4", "mixed-2-32"} <= used


def test_smallest_batches(executors: tuple[Executor, Executor]) -> None:
    """One token of one sequence is a bucket of its own; one sequence of two tokens is mixed with a padded S."""
    _agree(executors, [Part([5], 0, [3])])
    _agree(executors, [Part([6], 1, [3])])
    _agree(executors, [Part([7, 8], 2, [3])])
    _agree(executors, [Part([7], 4, [3]), Part([1], 0, [9])])
    _agree(executors, [Part([9] * 29, 0, [10, 11, 12, 13]), Part([1], 5, [3]), Part([1], 1, [9]), Part([2], 0, [20])])


def test_a_batch_does_not_change_its_members(executors: tuple[Executor, Executor]) -> None:
    """The logits of a sequence are those it gets alone, whatever is batched with it."""
    for executor in executors:
        alone = executor.run(_batch([Part([3, 1, 4, 1, 5], 0, [0])])).logits[0].clone()
        others = [Part([2, 7], 0, [1]), Part([3, 1, 4, 1, 5], 0, [2]), Part([9] * 20, 0, [3, 4, 5])]
        together = executor.run(_batch(others)).logits[1].clone()
        assert float((alone - together).norm() / alone.norm()) < 1e-5


def test_warming_up_touches_nothing_of_a_request(
    executors: tuple[Executor, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 0 and the scrap slot are no request's; all else is as before, and every bucket has run."""
    ran: set[str] = set()
    bound = GraphPrograms.bound
    monkeypatch.setattr(
        GraphPrograms, "bound", lambda graph, name, size: (ran.add(size.bucket.name), bound(graph, name, size))[1]
    )
    for executor in executors:
        ran.clear()
        prefilled = _batch([Part([3, 1, 4, 1, 5], 0, [7])])
        expected = executor.run(prefilled).logits[0].clone()
        pool, last = executor.states._pool, executor.states.tensors["state.last_token"]
        before = [blocks[1:].clone() for blocks in pool], last[:-1].clone()
        for bucket in executor.buckets:
            executor.warm_up(bucket)
        assert all(torch.equal(blocks[1:], old) for blocks, old in zip(pool, before[0], strict=True))
        assert torch.equal(last[:-1], before[1])
        assert ran >= {b.name for b in executor.buckets}
        decode = executor.run(_batch([Part([9], 5, [7])])).logits[0].clone()
        again = executor.run(_batch([Part([3, 1, 4, 1, 5, 9], 0, [8])])).logits[0]
        assert torch.isfinite(decode).all()
        assert float((decode - again).norm() / again.norm()) < 1e-5
        assert torch.equal(executor.run(prefilled).logits[0], expected)


def test_a_core_warms_up_what_is_cold(executors: tuple[Executor, Executor]) -> None:
    """Bucket by bucket, as often as it is asked, while requests come and go."""
    for executor in executors:
        cold = [b for b in executor.buckets if b.lo > 1]
        core = EngineCore(executor, 24, SchedulerConfig(), cold=cold)
        prompt = [3, 1, 4, 1, 5]
        found = []
        for number in range(len(cold) + 2):
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            core.add(EngineRequest(id=f"{number}", prompt=prompt, params=params, stop_ids=[], limit=4, seed=0))
            tokens: list[int] = []
            while core.unfinished:
                tokens += [token for update in core.step() for token in update.tokens]
            found.append(tokens)
            assert core.warm_up() == (number + 1 < len(cold))
        assert len(found[0]) == 4
        assert found == [found[0]] * len(found)


def test_warming_up_leaves_nothing_behind(executors: tuple[Executor, Executor]) -> None:
    """Requests of a core that is thrown away: a later prompt that fills the same blocks gives what it gave before."""
    for executor in executors:
        prefilled = _batch([Part([3, 1, 4, 1, 5], 0, [1])])
        expected = executor.run(prefilled).logits[0].clone()
        warm_up_host(executor, 24, 24)
        assert torch.equal(executor.run(prefilled).logits[0], expected)


def test_pick(executors: tuple[Executor, Executor]) -> None:
    def pick(tokens: int, sequences: int, rows: int, query_len: int) -> Size:
        return executors[0]._main.pick(StepInput(tokens, sequences, rows, query_len, {}))

    assert pick(1, 1, 1, 1) == (Bucket("decode", 1, 1), 1, 1, 1)
    assert pick(3, 3, 3, 1) == (Bucket("decode", 2, 4), 3, 3, 3)
    assert pick(2, 1, 0, 0) == (Bucket("mixed", 2, 32), 2, 2, 2)
    assert pick(32, 3, 4, 0) == (Bucket("mixed", 2, 32), 32, 3, 4)
    assert pick(4, 2, 4, 2) == (Bucket("mixed", 2, 32), 4, 2, 4)  # no bucket with two tokens a sequence
    with pytest.raises(ConfigError, match="no bucket of the artifact takes 33 tokens; compile with larger --buckets"):
        pick(33, 4, 1, 0)


def test_wrong_memory_table(compiled_artifact: Path, checkpoint: Path) -> None:
    """An artifact whose arena was planned by another version must not be written beyond its end."""
    whole = Artifact.open(compiled_artifact)
    half = msgspec.structs.replace(whole.memory, arena=whole.memory.arena // 2)
    smaller = Artifact(whole.folder, msgspec.structs.replace(whole.manifest, memory=half))
    plan = WeightPlan.from_json((compiled_artifact / "weights.json").read_text())
    source = open_source(checkpoint).checkpoint
    assert source is not None
    executor = Executor(smaller, load_weights(plan, source), BLOCKS)
    with pytest.raises(ConfigError, match=r"memory table.*compile again"):
        executor.run(_batch([Part([1, 2, 3], 0, [0])]))


def test_a_closed_executor_holds_no_memory(compiled_artifact: Path, checkpoint: Path) -> None:
    """Weights, cache and arena are gone, although the executor is still held; another engine of this process needs
    their place."""
    before = storages()
    executor = _open(compiled_artifact, checkpoint)
    executor.run(_batch([Part([1, 2, 3], 0, [1])]))
    gc.collect()
    new = storages_since(before)
    table = Artifact.open(compiled_artifact).memory
    whole = table.weights + table.arena + table.state + BLOCKS * table.block
    assert sum(storage.nbytes() for storage in new) >= whole
    held = [weakref.ref(storage) for storage in new]
    del new
    gc.collect()
    assert all(ref() is not None for ref in held)
    executor.close()
    gc.collect()
    left = sum(storage.nbytes() for ref in held if (storage := ref()) is not None)
    assert left < whole / 100, "only the small buffers of a step's inputs stay"


def test_cache_that_does_not_fit(eager_artifact: Path, checkpoint: Path) -> None:
    artifact = Artifact.open(eager_artifact)
    with pytest.raises(ConfigError, match=r"kv cache: \d+ blocks do not fit in memory"):
        Executor(artifact, {}, 10**12)


@settings(deadline=None, max_examples=draws(20, 60))
@given(data=st.data())
@pytest.mark.parametrize("longest", [64, 65536], ids=["small tables", "large tables"])
def test_staging_round_trip(longest: int, data: st.DataObject) -> None:
    """What was filled in is what the device views hold; padding rows are zero and own no tokens. Small block tables are
    copied whole, large ones as far as they are used."""
    from graphllm.compile.layout import base_inputs
    from graphllm.compile.tasks.generate import Generate

    config = CompileConfig(
        Target("cpu", ()), max_model_len=longest, block_size=8, max_num_seqs=5, max_num_batched_tokens=32
    )
    groups = (CacheGroup("full", 0, 8), CacheGroup("window", 40, 16))
    graph = Graph(*(lambda *_: () for _ in range(7)))  # type: ignore[misc, arg-type]
    task = Generate(Model((), lambda _: None, (graph,)), graph, SimpleNamespace(V=70), config)
    wide = InputSpec("wide", (3, "T"), "float32", neutral=2.5)
    specs = [*base_inputs(config, groups).values(), *task.inputs(), wide]
    staging = Staging(specs, {"T": 32, "S": 5, "R": 6}, TorchMemory(torch.device("cpu")))
    for turn in range(4):  # layouts move with T and S, and leave old bytes behind
        counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
        parts = [
            Part(rng.integers(1, 99, n).tolist(), int(rng.integers(0, 9)), rng.integers(1, 99, n).tolist())
            for n in counts
        ]
        batch = _batch(parts)
        step = batch._replace(
            arrays={
                **batch.arrays,
                "block_table.1": batch.arrays["block_table.0"][:, :4] + 1,
                "row_slots": rng.integers(0, 5, len(counts)).astype(np.int32),
                "temperature": rng.random(len(counts), np.float32) + 1,
                "top_k": rng.integers(1, 9, len(counts)).astype(np.int32),
                "seed": rng.integers(-(2**63), 2**63, len(counts), np.int64),
                "sample_index": rng.integers(1, 9, len(counts)).astype(np.int32),
                "wide": rng.random((3, sum(counts)), np.float32),
                **({} if turn % 2 else {"wanted": rng.integers(0, 9, len(counts)).astype(np.int32)}),
            }
        )
        mask = rng.integers(-(2**31), 2**31, (data.draw(st.integers(0, len(counts))), 3)).astype(np.int32)
        T = data.draw(st.integers(sum(counts), 32))
        S, R = data.draw(st.integers(len(counts), 5)), data.draw(st.integers(len(counts), 6))
        sizes, index = {"T": T, "S": S, "R": R}, turn % 2
        staging.fill(index, step, sizes)
        staging.fill_late(index, "mask", mask, sizes)
        staging.upload(index, sizes)
        staging.upload_late(index, "mask", len(mask), sizes)
        views = {name.removeprefix("step."): view.numpy() for name, view in staging.tensors(sizes).items()}
        neutral = {"query_start_loc": sum(counts), "slots": 5, "row_slots": 5, "top_p": 1, "repetition_penalty": 1,
                   "mask_row": -1, "target": -1, "wanted": -1, "exports": -1}  # fmt: skip
        for group in (0, 1):
            found = views[f"block_table.{group}"]
            table = step.arrays[f"block_table.{group}"]
            assert np.array_equal(found[: len(counts), : table.shape[1]], table)
        assert np.array_equal(views["mask"][: len(mask)], mask)
        assert np.array_equal(views["wide"][:, : sum(counts)], step.arrays["wide"])
        assert (views["wide"][:, sum(counts) :] == 2.5).all()
        assert views["wide"].shape == (3, T)
        for spec in specs:
            if len(spec.shape) > 1:
                continue
            name = spec.name
            given, found = step.arrays.get(name), views[name]
            assert len(found) == {"T": T, "S": S, "R": R, "S + 1": S + 1}[spec.shape[0]]
            count = 0
            if given is not None:
                count = len(given)
                assert found.dtype == given.dtype
                assert np.array_equal(found[:count], given)
            assert (found[count:] == neutral.get(name, 0)).all()


def test_stack_tables() -> None:
    assert stack_tables([[1, 2], [3], []]).tolist() == [[1, 2], [3, 0], [0, 0]]
    assert stack_tables([[1]]).dtype == np.int32
