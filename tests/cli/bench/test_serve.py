"""Runs of `graphllm bench serve`, and the command table of `graphllm bench`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphllm.cli.bench.loads import Traffic
from graphllm.cli.bench.report import about
from graphllm.cli.bench.serve import bench_serve
from graphllm.cli.bench.workload import arrivals
from graphllm.config import ConfigError
from tests.cli.bench.fake_openai import Fake, serving_thread
from tests.waiting import PATIENCE

Serve = Callable[..., tuple[int, dict[str, Any]]]


def test_a_run(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(first=0.1, between=0.01, tokens_per_piece=2)
    code, result = serve(fake, num_prompts=30, input_len="5-9", output_len="8", max_concurrency=10)
    assert code == 0
    assert (result["completed"], result["failed"], result["num_prompts"]) == (30, 0, 30)
    assert result["max_concurrent_requests"] == fake.peak == 10
    assert result["server"] == {"url": fake.url, "model": "fake", "max_model_len": 4096, "version": "1.2.3"}
    measured = fake.requests[1:]  # behind the warm-up
    assert len(measured) == 30
    assert result["total_input_tokens"] == sum(len(r["prompt"]) for r in measured)
    assert result["total_output_tokens"] == 240
    assert result["tokens_per_chunk"] == 2
    assert 100 <= result["median_ttft_ms"] <= 180
    assert 10 <= result["median_itl_ms"] <= 25
    assert 130 <= result["median_e2el_ms"] <= 300
    assert result["duration"] >= 3 * 0.13
    assert result["request_throughput"] == pytest.approx(30 / result["duration"])
    for request in measured:
        assert (request["ignore_eos"], request["stream"], request["temperature"]) == (True, True, 0)
        assert request["stream_options"] == {"include_usage": True}
        assert 5 <= len(request["prompt"]) <= 9
    assert {"name", "cores"} <= result["machine"].keys()
    assert {"graphllm", "python"} <= result["versions"].keys()
    shown = capsys.readouterr().out
    for part in ("Request throughput (req/s)", "Output token throughput (tok/s)", "TTFT", "TPOT", "ITL", "E2EL", "p99"):
        assert part in shown


def test_requests_are_sent_at_their_times(serve: Serve) -> None:
    fake = Fake()
    _, result = serve(fake, num_prompts=40, request_rate=60.0, burstiness=0.5, output_len="1", seed=5)
    planned = np.array(arrivals(40, 60.0, 0.5, 5))
    came = np.array(fake.arrived[1:]) - fake.arrived[1]
    assert (came - planned).min() > -0.01  # the first may come late
    assert np.median(np.abs(came - planned)) < 0.01
    assert result["request_rate"] == 60.0


def test_failed_requests_are_told_and_not_measured(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    fake = Fake(faults={3: "429", 5: "cut", 7: "429", 8: "no done"})
    code, result = serve(fake, num_prompts=20, max_concurrency=1, output_len="8")
    assert code == 1
    assert (result["completed"], result["failed"]) == (16, 4)
    assert result["total_output_tokens"] == 16 * 8
    assert result["failures"]["HTTP 429: too many requests are waiting"] == 2
    assert result["failures"]["the stream ended without [DONE]"] == 1
    assert "2 failed: HTTP 429: too many requests are waiting" in capfd.readouterr().err


def test_a_dataset(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "hi"}], "top_p": 0.5}\n\n{"prompt": "ho", "max_tokens": 3}\n'
    )
    fake = Fake()
    options: dict[str, Any] = {"dataset": file, "endpoint": "chat", "num_warmups": 0, "max_concurrency": 1}
    _, result = serve(fake, **options, num_prompts=5, output_len="6", temperature=0.5)
    assert result["completed"] == 5
    contents = [r["messages"][0]["content"] for r in fake.requests]
    assert contents == ["hi", "ho", "hi", "ho", "hi"]
    assert [r["max_tokens"] for r in fake.requests] == [6, 3, 6, 3, 6]
    assert [r.get("top_p") for r in fake.requests] == [0.5, None, 0.5, None, 0.5]
    assert {r["temperature"] for r in fake.requests} == {0.5}
    assert not any("ignore_eos" in r for r in fake.requests)
    assert {r["path"] for r in fake.requests} == {"/v1/chat/completions"}
    again = Fake()
    _, result = serve(again, **options, ignore_eos=True)
    assert result["completed"] == 2
    assert all(r["ignore_eos"] for r in again.requests)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "give an object with prompt or messages"),
        ('{"text": "x"}', "give an object with prompt or messages"),
        ('{"prompt": "x", "messages": []}', "give an object with prompt or messages"),
        ('{"messages": []}', "has messages: give --endpoint chat"),
        ("", "it has no line"),
    ],
)
def test_datasets_that_cannot_be_used(line: str, message: str, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=rf"^dataset.*{message}"):
        serve(Fake(), dataset=file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": "4000", "output_len": "100"}, "^input-len is '4000': .* 4100 tokens do not fit into .* 4096"),
        ({"endpoint": "chat"}, "^endpoint is chat: "),
        ({"model": "other"}, "^model is 'other': not served there; give one of fake"),
        ({"goodput": ["tps:5"]}, "^goodput has 'tps:5'"),
        ({"request_rate": 0.0}, "^request-rate is 0.0"),
        ({"request_rate": math.nan}, "^request-rate is nan"),
        ({"burstiness": -1.0}, "^burstiness is -1.0"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(options: dict[str, Any], message: str, serve: Serve) -> None:
    fake = Fake()
    with pytest.raises(ConfigError, match=message):
        serve(fake, **options)
    assert fake.requests == []


def test_output_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^output is "):
        bench_serve(Traffic("http://127.0.0.1:9"), tmp_path / "none" / "r.json", True)


def test_no_server_and_a_failed_warm_up(serve: Serve) -> None:
    fake = Fake(faults={0: "429"})
    with pytest.raises(ConfigError, match=r"^url: .* the warm-up request failed: HTTP 429: too many requests"):
        serve(fake)
    with pytest.raises(ConfigError, match=r"^url: no server answers at http://127.0.0.1"):
        bench_serve(Traffic(fake.url), None, True)


def test_the_key_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphllm", "bench", "serve", "--api-key", "secret", "--seed", "3"])
    assert about()["command"] == "graphllm bench serve --api-key ... --seed 3"
    monkeypatch.setattr(sys, "argv", ["graphllm", "bench", "serve", "--api-key=secret"])
    assert about()["command"] == "graphllm bench serve --api-key=..."


# --- the command table


def test_help_imports_nothing_heavy_and_every_option_has_one() -> None:
    script = (
        "import sys, typer\nfrom graphllm.cli.bench.app import bench_app\n"
        "command = typer.main.get_command(bench_app)\n"
        "assert set(command.commands) == {'serve', 'throughput', 'latency', 'startup'}\n"
        "for leaf in command.commands.values():\n"
        "    assert leaf.help and all(p.help for p in leaf.params)\n"
        "assert not {'torch', 'numpy', 'uvloop', 'msgspec', 'httptools'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


def test_the_load_test_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom graphllm.cli.bench.app import bench_app\n"
        "bench_app(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    with serving_thread(Fake()) as fake:
        arguments = ["serve", "--url", fake.url, "--num-prompts", "3", "--request-rate", "inf", "--output-len", "4",
                     "--goodput", "ttft:5000 tpot:5000", "--output", str(tmp_path / "r.json"), "--quiet"]  # fmt: skip
        subprocess.run(
            [sys.executable, "-c", script, *arguments], check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL
        )
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["request_goodput"] == result["request_throughput"]
    assert result["request_rate"] == "inf"
