"""The one loop over a core: nothing stays behind, results come in order, steps begin while requests are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import ParsedRequest, Processor
from graphllm.entrypoints.driver import Driver
from tests.engine.byte_tokenizer import make
from tests.engine.stub_core import StubCore, info

TEXTS = {(1,): [5, 6], (2,): [7], (3,): [8, 9]}  # of the core, by prompt


@pytest.fixture
def core(tmp_path: Path) -> StubCore:
    return StubCore(info(make(tmp_path).vocab_size), script=TEXTS)


@pytest.fixture
def driver(core: StubCore, tmp_path: Path) -> Driver:
    tokenizer = make(tmp_path)
    return Driver(core, Processor(tokenizer, core.info), OutputProcessor(tokenizer))


def _requests(driver: Driver) -> list[ParsedRequest]:
    params = {p: SamplingParams(max_tokens=len(text), ignore_eos=True) for p, text in TEXTS.items()}
    return [driver.processor.make([*p], how, f"r{p[0]}") for p, how in params.items()]


def _clean(driver: Driver) -> None:
    """Nothing is left, and the driver goes on working."""
    assert (driver.core.unfinished, driver.outputs.unfinished) == (0, 0)
    found = driver.finish(_requests(driver))
    assert [output.outputs[0].token_ids for output in found] == list(TEXTS.values())


def test_outputs_are_in_the_order_of_the_requests(driver: Driver) -> None:
    ended: list[RequestOutput] = []
    found = driver.finish(_requests(driver), ended.append)
    assert [output.outputs[0].token_ids for output in found] == list(TEXTS.values())
    assert [output.request_id for output in ended] == ["r2", "r1", "r3"]
    _clean(driver)


def test_all_are_queued_or_none(driver: Driver, core: StubCore) -> None:
    core.refused.add("r3")
    with pytest.raises(ConfigError, match="r3: refused"):
        driver.submit(*_requests(driver))
    driver.drain()
    assert sorted(core.aborted) == ["r1", "r2"]
    core.refused.clear()
    _clean(driver)


@pytest.mark.parametrize("kind", [ConfigError, KeyboardInterrupt])
def test_nothing_stays_when_a_request_cannot_be_made(driver: Driver, kind: type[BaseException]) -> None:
    def requests() -> Iterator[ParsedRequest]:
        yield from _requests(driver)[:2]
        raise kind

    with pytest.raises(kind):
        driver.run(requests(), lambda step: None)
    _clean(driver)


def test_a_broken_core_is_not_stepped_again(driver: Driver, core: StubCore) -> None:
    core.failing[1] = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        driver.finish(_requests(driver))
    assert (core.steps, driver.outputs.unfinished) == (1, 0)


@pytest.mark.parametrize(("ahead", "steps"), [(False, [0, 0, 0]), (True, [0, 1, 2])])
def test_steps_begin_while_requests_are_made(tmp_path: Path, ahead: bool, steps: list[int]) -> None:
    tokenizer = make(tmp_path)
    core = StubCore(info(tokenizer.vocab_size, max_num_batched_tokens=1), script=TEXTS)
    driver = Driver(core, Processor(tokenizer, core.info), OutputProcessor(tokenizer))
    seen = []

    def requests() -> Iterator[ParsedRequest]:
        for request in _requests(driver):
            seen.append(core.steps)
            yield request

    driver.run(requests(), lambda step: None, ahead=ahead)
    assert seen == steps
    _clean(driver)
