"""GuideLLM, as it is installed, measures a server; docs/clients.md has the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphllm.embedded import MODEL_DIR
from tests.server.live import Served
from tests.server.sdk import MODEL

pytestmark = pytest.mark.slow
REQUESTS, OUTPUT_TOKENS = 6, 12


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(path: str, served: Served, tmp_path: Path) -> None:
    pytest.importorskip("guidellm")
    options = {
        "backend": f"kind=openai_http,target={served.url},model={MODEL},request_format={path}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL_DIR}",
        "data": f"kind=synthetic_text,prompt_tokens=24,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", "--disable-console", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},  # nothing is loaded from the network
    )
    assert done.returncode == 0, done.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["request_totals"] == totals
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * OUTPUT_TOKENS
    assert metrics["output_tokens_per_second"]["successful"]["mean"] > 0
