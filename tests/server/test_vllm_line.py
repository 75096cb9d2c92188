"""A command line that was written for `vllm serve` starts a server here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphllm.embedded import MODEL_DIR
from tests.server.live import Served

LINE = """--host 127.0.0.1 --tensor-parallel-size 1 -pp 1 --pipeline_parallel_size=1 --dtype auto --max-model-len 1k
--gpu-memory-utilization 0.9 --swap-space 4 --cpu-offload-gb 0 --tokenizer-mode auto --kv-cache-dtype auto
--enable-chunked-prefill --no-enable-lora --disable-custom-all-reduce --max-num-seqs 8 --enable-prefix-caching --seed 0
--enforce-eager --device cpu --runner auto --convert auto --block-size 16 --load-format auto --disable-log-stats
--max_num_batched_tokens 2K --compilation-config.mode 3 -O2 --limit-mm-per-prompt {} --scheduling-policy fcfs
--served-model-name first second"""


@pytest.mark.thorough
def test_it_starts_and_answers(tmp_path: Path) -> None:
    server = Served(tmp_path / "log", MODEL_DIR, *LINE.split())
    try:
        server.wait_ready()
        models = json.loads(server.get("/v1/models")[1])["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("first", 1000), ("second", 1000)]
        told = [line.split()[0] for line in server.log.read_text().splitlines() if ": no effect here; " in line]
        assert told == ["disable_custom_all_reduce", "compilation_config"]
        body = {"model": "second", "temperature": 0, "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
        status, answer, _ = server.post("/v1/chat/completions", body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "12 + 7 = 19.")
        assert server.stop() == 0
    finally:
        server.process.kill()
