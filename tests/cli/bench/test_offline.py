"""`graphllm bench throughput` and `latency` with a tiny model."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError


@pytest.fixture
def engine(checkpoint: Path, eager_artifact: Path) -> Any:
    from graphllm.config import EngineArgs

    return EngineArgs(checkpoint, artifact=eager_artifact)


def test_throughput(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from graphllm.cli.bench.loads import Throughput
    from graphllm.cli.bench.offline import bench_throughput

    begun = time.perf_counter()
    bench_throughput(engine, Throughput(10, "4-8", "3", 2, 2, temperature=1.0), tmp_path / "r.json", True)
    whole = time.perf_counter() - begun
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["num_requests"] == 10
    assert 10 * 6 <= result["total_prompt_tokens"] <= 10 * 10
    assert result["total_output_tokens"] == 10 * 3 * 2
    assert 0 < result["elapsed_time"] < whole
    assert result["requests_per_second"] == pytest.approx(10 / result["elapsed_time"])
    assert result["output_tokens_per_second"] == pytest.approx(60 / result["elapsed_time"])
    assert result["engine"]["max_num_seqs"] == 4
    assert result["load_seconds"].keys() >= {"import torch", "weights"}
    assert "Output tokens per second" in capsys.readouterr().out


def test_latency(engine: Any, tmp_path: Path) -> None:
    from graphllm.cli.bench.loads import Latency
    from graphllm.cli.bench.offline import bench_latency

    begun = time.perf_counter()
    bench_latency(engine, Latency(3, 5, 6, num_iters=4, num_iters_warmup=1), tmp_path / "r.json", True)
    whole = time.perf_counter() - begun
    result = json.loads((tmp_path / "r.json").read_text())
    latencies = result["latencies"]
    assert len(latencies) == 4
    assert 0 < sum(latencies) < whole
    assert result["avg_latency"] == pytest.approx(statistics.fmean(latencies))
    assert result["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert result["percentiles"]["50"] == pytest.approx(statistics.median(latencies))
    assert result["ms_per_output_token"] == pytest.approx(1e3 * result["avg_latency"] / 6)
    assert result["mean_ttft_ms"] + 5 * result["mean_tpot_ms"] == pytest.approx(1e3 * result["avg_latency"])
    assert result["output_tokens_per_second"] == pytest.approx(18 / result["avg_latency"])


def test_offline_mistakes(engine: Any) -> None:
    from graphllm.cli.bench.loads import Latency, Throughput
    from graphllm.cli.bench.offline import bench_latency, bench_throughput

    with pytest.raises(ConfigError, match=r"^batch-size is 5: a step holds 4 sequences; raise --max-num-seqs"):
        bench_latency(engine, Latency(5, 4, 4), None, True)
    with pytest.raises(ConfigError, match=r"^input-len and output-len need 100 tokens: the context is 96"):
        bench_throughput(engine, Throughput(1, "90", "10"), None, True)
    with pytest.raises(ConfigError, match=r"^n is 2: with temperature 0 "):
        bench_throughput(engine, Throughput(1, n=2), None, True)


def test_shapes_without_a_tokenizer(tmp_path: Path, checkpoint: Path) -> None:
    from graphllm.cli.bench.loads import Throughput
    from graphllm.cli.bench.offline import bench_throughput
    from graphllm.config import EngineArgs

    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text((checkpoint / "config.json").read_text())
    args = EngineArgs(
        tmp_path / "shape", load_format="dummy", backend="eager", target="cpu", max_num_seqs=2,
        max_num_batched_tokens=16,
    )  # fmt: skip
    bench_throughput(args, Throughput(3, "4", "3"), tmp_path / "r.json", True)
    assert json.loads((tmp_path / "r.json").read_text())["total_output_tokens"] == 9
