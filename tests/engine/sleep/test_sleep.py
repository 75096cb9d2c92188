"""An engine of this process sleeps and wakes up: texts are as before, memory is given back, and no request is lost."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, EngineArgs, SamplingParams
from graphllm.config import ConfigError
from graphllm.engine.process.sleep_orders import SleepError
from graphllm.engine.requests.request import QueueFullError
from graphllm.entrypoints.llm_engine import LLMEngine
from graphllm.runtime.commands.worker import Worker
from graphllm.runtime.sleeping.rank_sleep import KEY
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading import baked
from tests.artifacts import LIMITS
from tests.tiers import draws, thorough

EAGER: dict[str, Any] = {"target": "cpu", "backend": "eager", "dtype": "float32", **LIMITS}
PROMPTS = ["hello world, the cat", "what is the answer", "a list of words in a row", "hello", "one more than slots"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Texts = dict[SamplingParams, list[str]]  # in the order of the prompts
SAMPLED = SamplingParams(temperature=1.0, seed=7, presence_penalty=0.5, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, compiled_artifact: Path) -> Iterator[LLM]:
    with LLM(checkpoint, artifact=compiled_artifact, enable_sleep_mode=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(engine: LLM) -> Texts:
    """The texts of an engine that has not slept."""
    return {params: texts(engine, params) for params in (GREEDY, SAMPLED)}


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """Awake before and after each test, with nothing in it."""
    yield engine
    engine.wake_up()
    steps = engine.llm_engine
    steps.abort_request([*steps._names])
    while steps.core.unfinished:
        steps.step()
    assert engine.reset_prefix_cache()


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def memory_of(llm: LLM) -> Any:
    """What gives memory back and takes it, the seam at which failures are made."""
    core: Any = llm.llm_engine.core
    return core.executor.worker.kept[KEY]._memory


def weights(worker: Worker) -> dict[str, bytes]:
    return {name: weight.numpy().tobytes() for name, weight in worker.weights.items()}


def resident(array: Any) -> int:
    """Bytes of an array that lie in whole pages, and are in memory."""
    first = -(-array.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (array.data_ptr() + array.nbytes - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * max(0, count))()
    if found:
        size = ctypes.c_size_t(count * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size, found) == 0
    return sum(f & 1 for f in found) * mmap.PAGESIZE


@pytest.mark.parametrize("level", [1, 2])
def test_texts_are_as_before(llm: LLM, expected: Texts, level: int) -> None:
    executor: Any = llm.llm_engine.core.executor  # type: ignore[attr-defined]
    bytes_before = weights(executor.worker)
    assert texts(llm) == expected[GREEDY]
    places = {name: tensor.data_ptr() for name, tensor in executor.worker.weights.items()}
    cache = [memory for memory in executor.states.memories if memory.nbytes >= 1 << 16]
    largest = max(executor.worker.weights.values(), key=lambda weight: weight.nbytes)
    assert sum(map(resident, cache)) > 0
    assert resident(largest) > 0
    for _ in range(2):
        llm.sleep(level)
        assert llm.is_sleeping()
        assert sum(map(resident, cache)) == 0
        assert (resident(largest) == 0) == (level == 2)
        llm.wake_up()
        assert not llm.is_sleeping()
        assert weights(executor.worker) == bytes_before
        assert {name: tensor.data_ptr() for name, tensor in executor.worker.weights.items()} == places
        assert {params: texts(llm, params) for params in expected} == expected


def test_two_steps_of_waking(llm: LLM, expected: Texts) -> None:
    before = expected[GREEDY]
    for level, first, second in ((1, "weights", "kv_cache"), (2, "kv_cache", "weights")):
        llm.sleep(level)
        llm.wake_up([first])
        assert llm.is_sleeping()
        with pytest.raises(ConfigError, match="asleep: call wake_up"):
            llm.generate("hello", GREEDY, use_tqdm=False)
        llm.llm_engine.add_request("early", "hello", GREEDY)
        for _ in range(3):
            assert llm.llm_engine.step() == []
        llm.wake_up([second])
        assert not llm.is_sleeping()
        (early,) = [output for _ in range(40) for output in llm.llm_engine.step() if output.finished]
        assert early.outputs[0].text == before[PROMPTS.index("hello")]
        assert texts(llm) == before


def test_weights_that_were_written(llm: LLM, expected: Texts) -> None:
    """Level 1 brings back what there was, level 2 what the checkpoint has."""
    before = expected[GREEDY]
    llm.collective_rpc("tests.engine.rank_functions:scale", args=("head.norm", -1.0))
    changed = texts(llm)
    assert changed != before
    llm.sleep(1)
    llm.wake_up()
    assert texts(llm) == changed
    llm.sleep(2)
    llm.wake_up()
    assert texts(llm) == before


def test_the_prefix_cache_is_forgotten(llm: LLM) -> None:
    long = {"prompt_token_ids": list(range(20, 60))}
    llm.generate(long, GREEDY, use_tqdm=False)
    assert llm.generate(long, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    llm.sleep(0)
    llm.wake_up(["scheduling"])
    assert llm.generate(long, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0  # a pause keeps it
    llm.sleep(1)
    llm.wake_up()
    assert llm.generate(long, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def _begin(llm: LLM, params: SamplingParams, steps: int) -> dict[str, Any]:
    """Requests that run, and one that waits for a slot; the outputs of those that have finished."""
    engine, done = llm.llm_engine, dict[str, Any]()
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    for _ in range(steps):
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def _finish(llm: LLM) -> dict[str, Any]:
    engine, done = llm.llm_engine, dict[str, Any]()
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_running_requests(llm: LLM, expected: Texts, mode: Any, level: int) -> None:
    begun = _begin(llm, SAMPLED, 7)
    assert begun == {}
    core: Any = llm.llm_engine.core
    running = core.stats().running
    assert running == 4
    llm.sleep(level, mode)
    stats = core.stats()
    assert (stats.running, stats.waiting) == (0, {"abort": 0, "wait": 1, "keep": 5}[mode])
    if mode == "abort":
        found = _finish(llm)
        assert {output.outputs[0].finish_reason for output in found.values()} == {"abort"}
        assert all(expected[SAMPLED][int(id)].startswith(output.outputs[0].text) for id, output in found.items())
        llm.wake_up()
        return
    llm.wake_up()
    found = _finish(llm)
    assert [found[str(i)].outputs[0].text for i in range(5)] == expected[SAMPLED]
    assert {output.outputs[0].finish_reason for output in found.values()} == {"length"}


def test_several_completions_of_a_request_go_on(llm: LLM) -> None:
    two = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=20, ignore_eos=True, logprobs=2)
    expected = [[c.text for c in output.outputs] for output in llm.generate(PROMPTS[:2], two, use_tqdm=False)]
    for number, prompt in enumerate(PROMPTS[:2]):
        llm.llm_engine.add_request(str(number), prompt, two)
    for _ in range(6):
        llm.llm_engine.step()
    llm.sleep(1, "keep")
    llm.wake_up()
    found = _finish(llm)
    assert [[c.text for c in found[str(i)].outputs] for i in range(2)] == expected


def test_asked_twice(llm: LLM, expected: Texts) -> None:
    before = expected[GREEDY]
    llm.wake_up()
    llm.sleep(1)
    llm.llm_engine.add_request("waits", "hello", GREEDY)
    llm.sleep(1)  # does not end what waits
    with pytest.raises(ConfigError, match="level is 2: the engine sleeps at level 1; wake it up first"):
        llm.sleep(2)
    assert llm.is_sleeping()
    with pytest.raises(ConfigError, match="memory of weights and kv_cache is given back"):
        llm.wake_up(["scheduling"])
    llm.wake_up(["weights", "weights"])
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    llm.sleep(2)  # the weights are awake, so any level will do
    llm.wake_up()
    llm.wake_up()
    assert _finish(llm)["waits"].outputs[0].text == before[PROMPTS.index("hello")]
    assert texts(llm) == before


def test_the_cache_alone(llm: LLM, expected: Texts) -> None:
    before = expected[GREEDY]
    with pytest.raises(ConfigError, match="awake; sleep at level 0 first"):
        llm.release_kv_cache_memory()
    executor: Any = llm.llm_engine.core.executor  # type: ignore[attr-defined]
    llm.sleep(0, "keep")
    assert sum(map(resident, executor.states.memories)) > 0
    llm.release_kv_cache_memory()
    assert sum(map(resident, executor.states.memories)) == 0
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping()
    assert texts(llm) == before


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.sleep(3), "level is 3: use 1"),
        (lambda llm: llm.sleep(True), "level is True: use 1"),
        (lambda llm: llm.sleep("one"), "level is 'one': use 1"),
        (lambda llm: llm.sleep(1, "later"), "mode is 'later': use one of abort, wait, keep"),
        (lambda llm: llm.wake_up(["weight"]), "tags has 'weight': use weights, kv_cache, scheduling"),
    ],
)
def test_mistakes(llm: LLM, ask: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(llm)
    assert not llm.is_sleeping()


class _Broken:
    """Memory of which one method fails once."""

    def __init__(self, memory: Any, method: str, number: int) -> None:
        self._memory, self._method, self._left = memory, method, number

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._memory, name)
        if name != self._method:
            return real

        def broken(*given: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise ConfigError("memory: none is left")
            return real(*given)

        return broken


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("method", "number"), [("map", 1), ("map", 2), ("finish", 1)])
def test_waking_up_fails_halfway(
    llm: LLM, expected: Texts, monkeypatch: pytest.MonkeyPatch, level: int, method: str,
    number: int,
) -> None:  # fmt: skip
    before = expected[GREEDY]
    core: Any = llm.llm_engine.core
    rank = core.executor.worker.kept[KEY]
    llm.sleep(level)
    llm.llm_engine.add_request("waits", "hello", GREEDY)
    monkeypatch.setattr(rank, "_memory", _Broken(rank._memory, method, number))
    with pytest.raises(SleepError, match="wake_up: memory: none is left; the engine is asleep as before"):
        llm.wake_up()
    assert llm.is_sleeping()
    assert rank.asleep == {"weights", "kv_cache"}
    assert sum(map(resident, core.executor.states.memories)) == 0
    assert llm.llm_engine.step() == []
    llm.wake_up()
    assert _finish(llm)["waits"].outputs[0].text == before[PROMPTS.index("hello")]
    assert texts(llm) == before


def test_files_are_gone_at_waking(llm: LLM, monkeypatch: pytest.MonkeyPatch, expected: Texts) -> None:
    before = expected[GREEDY]
    rank: Any = llm.llm_engine.core.executor.worker.kept[KEY]  # type: ignore[attr-defined]
    reload = rank._reload

    def gone() -> None:
        raise FileNotFoundError("model.safetensors")

    llm.sleep(2)
    monkeypatch.setattr(rank, "_reload", gone)
    with pytest.raises(SleepError, match=r"FileNotFoundError: model\.safetensors; the engine is asleep"):
        llm.wake_up(["weights"])
    assert llm.is_sleeping()
    monkeypatch.setattr(rank, "_reload", reload)
    llm.wake_up()
    assert texts(llm) == before


def test_falling_asleep_fails(llm: LLM, expected: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = llm.llm_engine.core.executor.worker.kept[KEY]  # type: ignore[attr-defined]
    monkeypatch.setattr(rank, "_memory", _Broken(rank._memory, "save", 1))
    _begin(llm, SAMPLED, 5)
    with pytest.raises(SleepError, match="sleep: memory: none is left; the engine is awake as before"):
        llm.sleep(1, "keep")
    assert not llm.is_sleeping()
    found = _finish(llm)
    assert [found[str(i)].outputs[0].text for i in range(5)] == expected[SAMPLED]


def test_gauges(llm: LLM) -> None:
    def state() -> str:
        (on,) = (m.labels["sleep_state"] for m in llm.get_metrics() if m.name == "vllm:engine_sleep_state" and m.value)
        return on

    assert state() == "awake"
    llm.sleep(1)
    assert state() == "weights_offloaded"
    llm.wake_up()
    llm.sleep(2)
    assert state() == "discard_all"


def test_many_times(llm: LLM, expected: Texts) -> None:
    """Random requests, levels, modes and ways of waking: every text is as without sleep, and nothing grows."""
    chance, engine = random.Random(5), llm.llm_engine
    core: Any = engine.core
    marks = []
    for cycle in range(draws(16, 50)):
        asked = {}
        for number in range(chance.randrange(1, 7)):
            params, at = chance.choice([GREEDY, SAMPLED]), chance.randrange(len(PROMPTS))
            asked[f"{cycle}-{number}"] = expected[params][at]
            engine.add_request(f"{cycle}-{number}", PROMPTS[at], params)
        found = {}
        for _ in range(chance.randrange(20)):
            found |= {output.request_id: output for output in engine.step() if output.finished}
        llm.sleep(chance.choice([0, 1, 2]), chance.choice(["wait", "keep"]))
        for tags in chance.choice([[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]]):
            llm.wake_up(tags)
        found |= _finish(llm)
        assert {id: output.outputs[0].text for id, output in found.items()} == asked
        stats = core.stats()
        assert stats.free_blocks == stats.total_blocks
        marks.append(_anonymous())
    assert marks[-1] <= marks[len(marks) // 4] + (8 << 20), marks


def _anonymous() -> int:
    """Bytes of this process's memory that no file has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def test_requests_are_refused(checkpoint: Path, compiled_artifact: Path) -> None:
    given = {"artifact": compiled_artifact, "enable_sleep_mode": True, "requests_while_asleep": "refuse"}
    engine = LLMEngine.from_engine_args(EngineArgs(model=checkpoint, **given))
    try:
        engine.sleep(1)
        with pytest.raises(QueueFullError, match="the engine is asleep"):
            engine.add_request("refused", "hello", GREEDY)
        engine.wake_up()
        engine.add_request("taken", "hello", GREEDY)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize("level", [0, 1])
def test_closed_while_it_sleeps(checkpoint: Path, compiled_artifact: Path, level: int) -> None:
    """Whoever holds its executor holds no memory."""
    with LLM(checkpoint, artifact=compiled_artifact, enable_sleep_mode=True) as llm:
        executor: Any = llm.llm_engine.core.executor  # type: ignore[attr-defined]
        refs = [weakref.ref(weight.numbers.base) for weight in executor.worker.parameters.values()]
        llm.sleep(level)
    gc.collect()
    assert executor.worker.kept == {}
    assert not any(ref() is not None for ref in refs)


def test_without_sleep_mode(checkpoint: Path, compiled_artifact: Path) -> None:
    with LLM(checkpoint, artifact=compiled_artifact) as llm:
        core: Any = llm.llm_engine.core
        assert KEY not in core.executor.worker.kept
        assert "sleep" not in [part.name for part in core.parts]
        assert not llm.is_sleeping()
        for ask in (llm.sleep, llm.wake_up):
            with pytest.raises(ConfigError, match="enable_sleep_mode is off: start the engine with it"):
                ask()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="compiled"),
        thorough(EAGER, id="torch"),
        thorough(EAGER | {"load_format": "dummy"}, id="random"),
    ],
)
def test_ways_of_loading(checkpoint: Path, settings: dict[str, Any], compiled_artifact: Path) -> None:
    """Weights are read again as they were read first."""
    settings = settings or {"artifact": compiled_artifact}
    with LLM(checkpoint, enable_sleep_mode=True, **settings) as llm:
        core: Any = llm.llm_engine.core
        executor = core.executor
        before, numbers = texts(llm), weights(executor.worker)
        largest = max(executor.worker.weights.values(), key=lambda weight: weight.nbytes)
        for level in (1, 2):
            llm.sleep(level)
            assert sum(map(resident, executor.states.memories)) == 0
            assert (resident(largest) == 0) == (level == 2)
            llm.wake_up()
            assert weights(executor.worker) == numbers
            assert texts(llm) == before


@pytest.mark.parametrize("backend", ["compiled", thorough("eager")])
def test_weights_that_are_a_mapped_file(
    checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest, backend: str
) -> None:
    """Their pages leave the process at any level: the file has them."""
    place = Path(shutil.copytree(request.getfixturevalue(f"{backend}_artifact"), tmp_path / "artifact"))
    baked.bake(place, Checkpoint.open(checkpoint))
    with LLM(checkpoint, artifact=place, enable_sleep_mode=True) as llm:
        executor: Any = llm.llm_engine.core.executor  # type: ignore[attr-defined]
        before, numbers = texts(llm), weights(executor.worker)
        assert _of_process(place / "weights.bin") > sum(map(len, numbers.values()))
        for level in (1, 2):
            llm.sleep(level)
            assert _of_process(place / "weights.bin") <= mmap.PAGESIZE  # the first one holds no weights
            llm.wake_up()
            assert texts(llm) == before
            assert weights(executor.worker) == numbers


def _of_process(file: Path) -> int:
    """Bytes of a mapped file that this process has in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and name == "Rss:":
            found += 1024 * int(fields[0])
    return found


def test_with_a_cache_in_tiers(checkpoint: Path, compiled_artifact: Path, expected: Texts) -> None:
    """Requests that lose their blocks, and copies that are under way, are as without tiers."""
    given: dict[str, Any] = {"artifact": compiled_artifact, "kv_offloading_size": 1 << 20}
    with LLM(checkpoint, enable_sleep_mode=True, **given) as llm:
        assert "tiers" in [part.name for part in llm.llm_engine.core.parts]  # type: ignore[attr-defined]
        for level, mode in ((1, "keep"), (2, "wait"), (0, "keep"), (2, "keep")):
            _begin(llm, SAMPLED, 9)
            llm.sleep(level, mode)
            llm.wake_up()
            found = _finish(llm)
            assert [found[str(i)].outputs[0].text for i in range(5)] == expected[SAMPLED]
            assert texts(llm) == expected[GREEDY]


@pytest.mark.parametrize(("level", "goes_on"), [(1, True), (2, False)])
def test_a_conversation_goes_on_after_a_sleep(
    checkpoint: Path, compiled_artifact: Path, level: int, goes_on: bool
) -> None:
    """Level 1 copies to host memory what only the device has."""
    given: dict[str, Any] = {"artifact": compiled_artifact, "kv_offloading_size": 8 << 20}
    with LLM(checkpoint, enable_sleep_mode=True, **given) as llm:
        prompt = {"prompt_token_ids": [*range(5, 60)]}
        expected = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].text
        assert llm.llm_engine.core.stats().tiers["host"].used_bytes == 0
        llm.sleep(level)
        llm.wake_up()
        found = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert found.outputs[0].text == expected
        assert (found.num_cached_tokens > 40) == goes_on
        assert (llm.llm_engine.core.stats().tiers["host"].hit_tokens > 40) == goes_on
