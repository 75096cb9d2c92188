"""`graphllm serve` with a cache in tiers: what one server has computed, the next one finds on disk; what it is asked to
forget under load."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.server.live import Served
from tests.waiting import until

_PROMPTS = [f"Story number {number}. " + "There was a cache that did not forget. " * 8 for number in range(6)]
_KEY = {"authorization": "Bearer a"}


def _opened(log: Path, artifact: Path, folder: Path) -> Served:
    tiers = ("--kv-offloading-size", "64MiB", "--kv-offloading-disk", folder)
    return Served(log, "--artifact", artifact, "--admin-api-key", "a", *tiers).wait_ready()


def _answer(server: Served, prompt: str) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
    status, found, _ = server.post("/v1/completions", body, **_KEY)
    assert status == 200, found
    text: str = found["choices"][0]["text"]
    return text


def _cached(server: Served) -> float:
    return server.metric("graphllm_prompt_tokens_cached_total", **_KEY)


def _reset(server: Served) -> bool:
    """Whether it has forgotten all; False while requests run."""
    status, found, _ = server.post("/reset_prefix_cache", {}, **_KEY)
    assert (status, list(found)) == (200, ["reset"])
    done: bool = found["reset"]
    return done


def test_a_second_server_finds_what_the_first_one_has_computed(embedded_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    server = _opened(tmp_path / "first", embedded_artifact, folder)
    first = [_answer(server, prompt) for prompt in _PROMPTS]
    assert _cached(server) == 0
    assert server.stop() == 0, server.log.read_text()
    server = _opened(tmp_path / "second", embedded_artifact, folder)
    assert [_answer(server, prompt) for prompt in _PROMPTS] == first
    assert _cached(server) >= 64  # of the last prompts at least: the files are looked for while the first requests run
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    _forgets_under_load(server, folder, first)
    assert server.stop() == 0, server.log.read_text()


def _forgets_under_load(server: Served, folder: Path, expected: list[str]) -> None:
    """Texts are right while it is asked to forget, which it refuses as long as requests run. Then nothing is left in
    any tier."""
    found, answers = dict[int, list[str]](), list[bool]()

    def talk(number: int) -> None:
        found[number] = [_answer(server, prompt) for prompt in _PROMPTS]

    talks = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in talks:
        thread.start()
    while any(thread.is_alive() for thread in talks):
        answers.append(_reset(server))
    assert found == dict.fromkeys(range(4), expected)
    assert False in answers
    until(lambda: _reset(server))
    until(lambda: not [path for path in folder.glob("*/blocks-*/*/*/*") if path.is_file()])
    before = _cached(server)
    assert _answer(server, _PROMPTS[0]) == expected[0]
    assert _cached(server) == before
