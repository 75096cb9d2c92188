"""A server whose engine sleeps: its routes, the memory of its process, and requests that come or run meanwhile."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Served
from tests.tiers import thorough
from tests.waiting import PATIENCE, until

SLEEPS = ("--enable-sleep-mode", "--admin-api-key", "operator", "--kv-cache-memory-bytes", "64MiB")
ADMIN = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module", params=[pytest.param(1, id="one core"), thorough(2, id="two cores")])
def sleeper(
    request: pytest.FixtureRequest, embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    cores = ("--data-parallel-size", request.param) if request.param > 1 else ()
    server = Served(tmp_path_factory.mktemp("sleeper") / "log", "--artifact", embedded_artifact, *SLEEPS, *cores)
    yield server.wait_ready()
    assert server.stop() == 0, server.log.read_text()


def post(server: Served, path: str) -> tuple[int, Any]:
    return server.post(path, b"", **ADMIN)[:2]


def sleeping(server: Served) -> bool:
    status, body = server.get("/is_sleeping", **ADMIN)
    assert status == 200
    return bool(json.loads(body)["is_sleeping"])


def ask(server: Served, number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": f"A list of {number} words:", "temperature": 0, "max_tokens": 16, "ignore_eos": True, **fields}
    status, found, _ = server.post("/v1/completions", body)
    assert status == 200, found
    choice: dict[str, Any] = found["choices"][0]
    return choice


def resident(server: Served) -> int:
    """Kilobytes that the engine's processes hold and no file has."""
    found = 0
    for pid in server.engine_pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return found


def slept(server: Served) -> dict[str, float]:
    """The gauge, by the name of the state: how many cores are in it."""
    found: dict[str, float] = {}
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith("vllm:engine_sleep_state{"):
            state = line.partition('sleep_state="')[2].partition('"')[0]
            found[state] = found.get(state, 0) + float(line.rpartition(" ")[2])
    return found


def test_memory_is_given_back_and_answers_are_the_same(sleeper: Served) -> None:
    cores = len(sleeper.engine_pids)
    before = [ask(sleeper, n)["text"] for n in range(4)]
    for level, state in ((1, "weights_offloaded"), (2, "discard_all")):
        held = resident(sleeper)
        assert post(sleeper, f"/sleep?level={level}") == (200, {"status": "sleeping", "level": level})
        assert sleeping(sleeper)
        # The cache's first 32 MiB are there from the start; the embedded model's weights are 2 MB.
        assert resident(sleeper) < held - cores * (30 << 10)
        assert slept(sleeper) == {"awake": 0, "weights_offloaded": 0, "discard_all": 0, state: cores}
        assert sleeper.get("/health")[0] == 200
        assert post(sleeper, "/wake_up?tags=weights") == (200, {"status": "sleeping", "tags_woken": ["weights"]})
        assert sleeping(sleeper)
        assert post(sleeper, "/wake_up?tags=kv_cache&tags=weights")[1]["status"] == "awake"
        assert not sleeping(sleeper)
        assert slept(sleeper) == {"awake": cores, "weights_offloaded": 0, "discard_all": 0}
        assert [ask(sleeper, n)["text"] for n in range(4)] == before


def test_requests_that_come_meanwhile_wait(sleeper: Served) -> None:
    before = ask(sleeper, 5)
    assert post(sleeper, "/sleep")[0] == 200
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, sleeper, 5)
        until(lambda: sleeper.metric("vllm:num_requests_waiting") == 1)
        assert post(sleeper, "/sleep")[0] == 200  # again, which does not end it
        assert post(sleeper, "/wake_up?tags=weights")[0] == 200
        assert not asked.done()
        assert post(sleeper, "/wake_up")[1] == {"status": "awake", "tags_woken": None}
        assert asked.result() == before


@pytest.mark.parametrize("mode", [thorough("abort"), thorough("wait"), "keep"])
def test_requests_that_run(sleeper: Served, mode: str) -> None:
    expected = ask(sleeper, 3, max_tokens=160)["text"]
    begun, so_far = threading.Event(), list[str]()

    def stream() -> str:
        body = {"prompt": "A list of 3 words:", "temperature": 0, "ignore_eos": True, "max_tokens": 160, "stream": True}
        request = urllib.request.Request(
            sleeper.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    so_far.append(choice["text"])
                    begun.set()
        return str(choice["finish_reason"])

    with ThreadPoolExecutor(1) as threads:
        streamed = threads.submit(stream)
        assert begun.wait(PATIENCE)
        assert post(sleeper, f"/sleep?level=2&mode={mode}")[0] == 200
        assert sleeper.metric("vllm:num_requests_running") == 0
        known = len(so_far)
        assert post(sleeper, "/wake_up")[0] == 200
        reason = streamed.result()
    if mode == "keep":  # what is computed again is rounded in another way, so that long texts may part
        assert reason == "length"
        assert expected.startswith("".join(so_far[:known]))
    elif reason == "abort":
        assert mode == "abort"
        assert expected.startswith("".join(so_far))
    else:
        assert (reason, "".join(so_far)) == ("length", expected)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/sleep?level=3", "level is '3': use 1"),
        ("/sleep?level=deep", "level is 'deep': use 1"),
        ("/sleep?mode=later", "mode is 'later': use one of abort, wait, keep"),
        ("/wake_up?tags=weight", "tags has 'weight': use weights, kv_cache, scheduling"),
        ("/release_kv_cache_memory", "the engine is awake; sleep at level 0 first"),
    ],
)
def test_mistakes(sleeper: Served, path: str, message: str) -> None:
    status, body = post(sleeper, path)
    assert (status, message in body["error"]["message"]) == (400, True), body
    assert not sleeping(sleeper)


def test_the_cache_alone(sleeper: Served) -> None:
    before = ask(sleeper, 2)["text"]
    held = resident(sleeper)
    assert post(sleeper, "/sleep?level=0&mode=keep")[0] == 200
    assert sleeping(sleeper)
    assert post(sleeper, "/release_kv_cache_memory") == (200, {"status": "kv_cache_released"})
    assert resident(sleeper) < held - (10 << 10)
    status, body = post(sleeper, "/wake_up?tags=scheduling")
    assert (status, "memory of kv_cache is given back" in body["error"]["message"]) == (400, True)
    assert post(sleeper, "/wake_up?tags=kv_cache")[1]["status"] == "awake"
    assert ask(sleeper, 2)["text"] == before


def test_only_with_the_operators_key(sleeper: Served) -> None:
    for path in ("/sleep", "/wake_up", "/release_kv_cache_memory"):
        assert sleeper.post(path, b"")[0] == 403
    assert sleeper.get("/is_sleeping")[0] == 403
    assert not sleeping(sleeper)


@pytest.mark.thorough
def test_other_servers_do_not_sleep(serve: Callable[..., Served]) -> None:
    server = serve("--admin-api-key", "operator").wait_ready()
    assert not sleeping(server)
    status, body = post(server, "/sleep")
    assert status == 400
    assert body["error"]["message"] == "enable_sleep_mode is off: start the engine with it"


@pytest.mark.thorough
def test_a_server_that_refuses_requests_while_it_sleeps(serve: Callable[..., Served]) -> None:
    server = serve(*SLEEPS, "--requests-while-asleep", "refuse").wait_ready()
    before = ask(server, 1)["text"]
    assert post(server, "/sleep")[0] == 200
    status, body, headers = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4})
    assert (status, int(headers["retry-after"]) > 0) == (429, True)
    assert "the engine is asleep" in body["error"]["message"]
    assert post(server, "/wake_up")[0] == 200
    assert ask(server, 1)["text"] == before


@pytest.mark.thorough
def test_a_server_that_sleeps_can_be_stopped(serve: Callable[..., Served]) -> None:
    """At once, though it was asked to finish its requests: what waits would wait for ever."""
    server = serve(*SLEEPS).wait_ready()
    assert post(server, "/sleep")[0] == 200
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(server.post, "/v1/completions", {"prompt": "hello", "max_tokens": 4})
        until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        assert server.stop() == 0, server.log.read_text()
        assert waits.exception() is not None or waits.result()[0] >= 500
