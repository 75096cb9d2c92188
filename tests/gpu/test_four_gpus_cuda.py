"""Four GPUs of one host, eight where there are, in every division, whose steps are captured graphs: transformers' text
and log-probabilities. One command, in three minutes:

    python -m pytest -m gpu tests/gpu/test_four_gpus_cuda.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphllm import LLM
from tests.engine.experts import test_moving_experts as here
from tests.engine.ranks.test_eight_ranks import check_dense, dense, experts  # noqa: F401
from tests.gpu.several_gpus import OPTIONS, end_with_parent

COUNT = 8 if torch.cuda.device_count() >= 8 else 4
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four NVIDIA GPUs")]
CLOSE = {"tolerance": 5e-3, "ties": 1e-2}  # products of float32 on GPUs may round to 19 bits
EXPERTS: dict[str, Any] = {
    **here.OPTIONS, **OPTIONS, "backend": "inductor", "kv_cache_memory_bytes": 1 << 26, "enable_eplb": False,
}  # fmt: skip
DENSE = {**EXPERTS, "enable_expert_parallel": False}
DIVISIONS: dict[str, dict[str, Any]] = {
    "matrices": {"tensor_parallel_size": COUNT},
    "matrices and stages": {"tensor_parallel_size": COUNT // 2, "pipeline_parallel_size": 2},
    "stages": {"tensor_parallel_size": COUNT // 4, "pipeline_parallel_size": 4},
    "engines": {"data_parallel_size": COUNT},
    "engines of ranks": {"data_parallel_size": COUNT // 2, "tensor_parallel_size": 2},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": COUNT},
    "with copies": {
        "tensor_parallel_size": COUNT, "enable_eplb": True,
        "eplb_config": {"num_redundant_experts": COUNT, "step_interval": 12},
    },
    "cores": {"data_parallel_size": COUNT},
}  # fmt: skip
COMPILE = """
import json, sys
from graphllm.config import EngineArgs
from graphllm.loading.artifact.model import resolve_model
resolve_model(EngineArgs(sys.argv[1], jobs=4, **json.loads(sys.argv[2])))
"""


@pytest.fixture(scope="module", autouse=True)
def cache(dense: Path, experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:  # noqa: F811
    """Where all engines find their artifacts, which are made at the same time."""
    place = tmp_path_factory.mktemp("cache")
    wanted = [(dense, DENSE | division) for division in DIVISIONS.values()]
    wanted += [(experts, EXPERTS | division) for division in OF_EXPERTS.values()]
    environment = {**os.environ, "GRAPHLLM_CACHE": str(place), "OMP_NUM_THREADS": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE, str(folder), json.dumps(settings)],
            env={**environment, "CUDA_VISIBLE_DEVICES": ",".join(str((i + k) % COUNT) for k in range(COUNT))},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_parent,
        )
        for i, (folder, settings) in enumerate(wanted)
    ]  # fmt: skip
    for process in processes:
        said = process.communicate(timeout=200)[0]
        assert process.returncode == 0, said
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHLLM_CACHE", str(place))
        yield place


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_dense_model(dense: Path, division: str) -> None:  # noqa: F811
    """Two heads of keys and values, fewer than ranks."""
    with LLM(dense, **DENSE | DIVISIONS[division]) as llm:
        for _ in range(2):  # the second time every graph is replayed
            check_dense(dense, llm, **CLOSE)


@pytest.mark.parametrize("division", OF_EXPERTS)
def test_experts_by_number(experts: Path, division: str) -> None:  # noqa: F811
    model = transformers.AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    with LLM(experts, **EXPERTS | OF_EXPERTS[division]) as llm:
        for _ in range(3):
            here.check(model, llm, here.PROMPTS * 3, **CLOSE)
