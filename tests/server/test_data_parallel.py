"""Two engine cores behind one server: who answers, what they share, and the death of one."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.events.wire import DECODE, BlockStored, replay, subscribe
from tests.server.live import Served
from tests.waiting import gone, until

TWO = ("--data-parallel-size", 2)
EVENTS = ("--kv-events-config", json.dumps({
    "enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv@pod@model",
}))  # fmt: skip
QUESTIONS = [f"What is {n} plus {n + 1}?" for n in range(12)]


@pytest.fixture(scope="module")
def pair(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two cores, for tests that leave it as it was."""
    server = Served(tmp_path_factory.mktemp("pair") / "log", "--artifact", embedded_artifact, *TWO, *EVENTS)
    yield server.wait_ready()
    pids = server.engine_pids
    assert server.stop() == 0, server.log.read_text()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24, **fields}


def answer(server: Served, question: str, **fields: Any) -> str:
    status, body, _ = server.post("/v1/chat/completions", chat(question, **fields))
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


def by_engine(server: Served, name: str) -> list[float]:
    """The values of a family, by the number of the engine."""
    found: dict[int, float] = {}
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith(name + "{") and (engine := re.search(r'engine="(\d+)"', line)):
            found[int(engine[1])] = found.get(int(engine[1]), 0.0) + float(line.rpartition(" ")[2])
    return [found[engine] for engine in sorted(found)]


def rises(server: Served, name: str, work: Callable[[], Any]) -> list[float]:
    """By how much the values of a counter rise."""
    before = by_engine(server, name)
    work()
    return [after - was for after, was in zip(by_engine(server, name), before, strict=True)]


def test_answers_are_those_of_one_core_and_both_give_them(served: Served, pair: Served) -> None:
    wanted = [answer(served, question) for question in QUESTIONS]
    found: list[str] = []

    def work() -> None:
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            found.extend(pool.map(lambda question: answer(pair, question), QUESTIONS))

    made = rises(pair, "graphllm_generation_tokens_total", work)
    assert found == wanted
    assert min(made) > 0.2 * sum(made), made
    assert by_engine(pair, "vllm:generation_tokens_total") == by_engine(pair, "graphllm_generation_tokens_total")
    assert by_engine(pair, "graphllm_engine_up") == [1, 1]


def test_streams_and_several_completions(served: Served, pair: Served) -> None:
    body = chat(QUESTIONS[3], n=3, temperature=0.8, seed=5, stream=True)
    texts = []
    for server in (served, pair):
        parts = ["", "", ""]
        for event in server.events("/v1/chat/completions", body):
            for choice in event["choices"]:
                parts[choice["index"]] += choice["delta"].get("content") or ""
        texts.append(parts)
    assert texts[0] == texts[1]


def test_the_openai_client(pair: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=pair.url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Hello!"}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20)
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_a_conversation_stays_with_its_core(pair: Served) -> None:
    """What it has said is in the cache of one core only, so the hits must be there, and the other one hears nothing."""
    beginning = "The quick brown fox jumps over the lazy dog and runs into the dark green forest. " * 3

    def work() -> None:
        for turn in range(6):
            status, _, _ = pair.post(
                "/v1/completions", {"prompt": beginning + f" Turn {turn}.", "max_tokens": 2, "temperature": 0}
            )
            assert status == 200

    before = by_engine(pair, "graphllm_prompt_tokens_total")
    hits = rises(pair, "graphllm_prefix_cache_hits_total", work)
    prompts = [now - was for now, was in zip(by_engine(pair, "graphllm_prompt_tokens_total"), before, strict=True)]
    home = prompts.index(max(prompts))
    assert prompts[1 - home] == 0, prompts
    assert hits[home] > 0.6 * prompts[home], (hits, prompts)
    assert hits[1 - home] == 0


def test_each_core_publishes_what_it_caches(served: Served, pair: Served) -> None:
    """The events of the core that has answered begin with the tokens of the prompt."""
    prompt = "Somebody has to say something that nobody has said before. " * 4
    sources = json.loads(pair.get("/kv_event_sources")[1])
    assert list(sources) == ["0", "1"]
    assert sources["1"]["endpoint"] != sources["0"]["endpoint"]
    subscribe(sources["0"]["endpoint"]).close()
    made = rises(
        pair, "graphllm_prompt_tokens_total",
        lambda: pair.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}),
    )  # fmt: skip
    tokens = pair.post("/tokenize", {"prompt": prompt})[1]["tokens"]
    batches = by_engine(pair, "graphllm_kv_event_batches_total")
    for rank, source in enumerate(sources.values()):
        assert (source["publisher"], source["topic"], source["buffer_steps"]) == ("zmq", "kv@pod@model", 10_000)
        messages = pair.wait(lambda s=source, n=batches[rank]: len(m := replay(s["replay_endpoint"], 0)) == n and m)
        assert {m.topic for m in messages} == {b"kv@pod@model"}
        found = [DECODE(m.payload) for m in messages]
        assert {batch.data_parallel_rank for batch in found} == {rank}
        first = [e for b in found for e in b.events if isinstance(e, BlockStored) and e.parent_block_hash is None]
        begins = [e for e in first if e.token_ids == tokens[: len(e.token_ids)] and len(e.token_ids) > len(tokens) // 2]
        assert bool(begins) is (made[rank] > 0)
    assert json.loads(served.get("/kv_event_sources")[1]) == {}


def test_aborts_and_the_cache_of_all_cores(serve: Callable[..., Served]) -> None:
    server = serve(*TWO, "--admin-api-key", "a").wait_ready()
    key = {"authorization": "Bearer a"}
    text = "one two three four five six seven eight nine ten " * 4
    for n in range(4):
        server.post("/v1/completions", {"prompt": f"{n} " + text, "max_tokens": 2}, **key)
    server.idle()
    assert server.post("/reset_prefix_cache", {}, **key)[1] == {"reset": True}
    hits = rises(
        server,
        "graphllm_prefix_cache_hits_total",
        lambda: [server.post("/v1/completions", {"prompt": f"{n} " + text, "max_tokens": 2}, **key) for n in range(4)],
    )
    assert hits == [0, 0]
    found: list[Any] = []
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}

    def ask(name: str) -> None:
        found.append(server.post("/v1/completions", body, x_request_id=name, **key))

    threads = [threading.Thread(target=ask, args=(f"mine-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    server.wait(lambda: by_engine(server, "graphllm_requests_running") == [2, 2])
    status, told, _ = server.post("/abort_requests", {"request_ids": [f"mine-{n}" for n in range(4)]}, **key)
    assert (status, told) == (200, {"aborted": 4})
    for thread in threads:
        thread.join()
    assert [reply[1]["choices"][0]["finish_reason"] for reply in found] == ["abort"] * 4
    assert server.stop() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("fronts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_core_fails_its_own_requests_and_comes_back(serve: Callable[..., Served], fronts: int) -> None:
    server = serve(*TWO, "--restart-engine", "--api-server-count", fronts).wait_ready()
    pids, body = server.engine_pids, {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(8) as pool:  # so long that all of them are seen running, and none has ended by the kill
        asked = [pool.submit(server.post, "/v1/completions", body) for _ in range(8)]
        server.wait(lambda: min(by_engine(server, "graphllm_requests_running")) >= 2)
        os.kill(pids[1], signal.SIGKILL)

        def degraded() -> Any:
            status, text = server.get("/health")
            assert status == 200, text  # the other one answers
            return (found := json.loads(text))["status"] == "degraded" and found

        health = server.wait(degraded)
        replies = [future.result() for future in asked]
    assert sorted({status for status, *_ in replies}) == [200, 503] or fronts > 1, [r[0] for r in replies]
    for status, reply, _ in replies:
        if status == 200:
            assert reply["usage"]["completion_tokens"] == 1000
        else:
            assert status in (500, 503)
            assert "killed by signal 9" in reply["error"]["message"], reply
    assert sum(status == 200 for status, *_ in replies) >= 2
    assert "killed by signal 9" in health["cause"]
    assert sorted(one["status"] for one in health["engines"])[-1] in ("ready", "restarting")
    server.logged("engine core 1 was restarted")
    server.wait(lambda: json.loads(server.get("/health")[1])["status"] == "ready")
    with ThreadPoolExecutor(8) as pool:
        made = rises(
            server,
            "graphllm_generation_tokens_total",
            lambda: list(pool.map(lambda _: server.post("/v1/completions", body | {"max_tokens": 50}), range(8))),
        )
    assert min(made) >= 100, made
    pids = server.engine_pids
    assert len(pids) == 2
    assert server.stop() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_without_restart_the_other_core_goes_on_alone(serve: Callable[..., Served]) -> None:
    server = serve(*TWO).wait_ready()
    os.kill(server.engine_pids[0], signal.SIGKILL)
    server.logged("engine core 0 is dead")
    status, text = server.get("/health")
    health = json.loads(text)
    assert (status, health["status"]) == (200, "degraded")
    assert [one["status"] for one in health["engines"]] == ["dead", "ready"]
    assert server.get("/health/live")[0] == 200
    assert answer(server, "Hello!")
    assert by_engine(server, "graphllm_engine_up") == [0, 1]
    os.kill(server.engine_pids[-1], signal.SIGKILL)
    server.logged("engine core 1 is dead")
    assert server.get("/health")[0] == server.get("/health/live")[0] == 503
    assert server.post("/v1/chat/completions", chat("Hello!"))[0] == 503


@pytest.mark.slow
def test_cores_end_with_a_server_that_is_killed(serve: Callable[..., Served]) -> None:
    server = serve(*TWO).wait_ready()
    pids = server.engine_pids
    server.process.kill()
    server.process.wait()
    until(lambda: gone(*pids))
