"""`graphllm serve` with a cache in tiers: what one server has computed, the next one finds on disk."""

from __future__ import annotations

from pathlib import Path

from tests.server.live import Served

_PROMPTS = [f"Story number {number}. " + "There was a cache that did not forget. " * 8 for number in range(6)]


def _serve(log: Path, artifact: Path, folder: Path) -> tuple[list[str], float]:
    """The answers of a server, and how many tokens of prompts it had in its cache."""
    server = Served(
        log, "--artifact", artifact, "--kv-offloading-size", "64MiB", "--kv-offloading-disk", folder
    ).wait_ready()
    answers = []
    for prompt in _PROMPTS:
        status, body, _ = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8})
        assert status == 200, body
        answers.append(body["choices"][0]["text"])
    cached = server.metric("graphllm_prompt_tokens_cached_total")
    assert server.stop() == 0, server.log.read_text()
    return answers, cached


def test_a_second_server_finds_what_the_first_one_has_computed(embedded_artifact: Path, tmp_path: Path) -> None:
    first, before = _serve(tmp_path / "first", embedded_artifact, tmp_path / "cache")
    second, after = _serve(tmp_path / "second", embedded_artifact, tmp_path / "cache")
    assert second == first
    assert before == 0
    assert after >= 64  # of the last prompts at least: the files are looked for while the first requests run
    assert (tmp_path / "cache" / "secret").stat().st_mode & 0o777 == 0o600
