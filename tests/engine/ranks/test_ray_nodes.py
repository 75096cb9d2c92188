"""Ranks on the nodes of a Ray cluster: two on this machine, which know of each other's devices only through Ray."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM
from graphllm.config import ConfigError
from graphllm.loading.core.place import node_count
from graphllm.runtime.ranks.rank_failure import RankError
from tests.engine.ranks.test_nodes import GREEDY, LONG, check_text, step_for_ever
from tests.engine.ranks.test_ranks import EAGER, PROMPTS
from tests.waiting import gone, until

RAY: dict[str, Any] = {"distributed_executor_backend": "ray", **EAGER}


class TestHowManyNodes:
    """Of `node_count`: ranks, width of a stage, devices of each node."""

    @pytest.mark.parametrize(
        ("degree", "width", "sizes", "count"),
        [
            (8, 8, [8, 8], 1),
            (16, 8, [8, 8], 2),
            (8, 4, [4, 4, 4], 2),
            (8, 2, [2, 4, 4, 2], 2),
            (8, 2, [2, 2, 2, 2], 4),
            (8, 8, [4, 4], 2),  # no node has a whole stage
            (1, 1, [0, 1], 1),
        ],
    )
    def test_as_few_as_can_be(self, degree: int, width: int, sizes: list[int], count: int) -> None:
        assert node_count(degree, width, sizes, 1, "GPU") == count

    def test_as_many_as_the_user_says(self) -> None:
        assert node_count(8, 2, [8, 8, 8, 8], 4, "GPU") == 4
        with pytest.raises(ConfigError, match=r"is 8 on 4 nodes, and the nodes of the cluster have 8, 8 GPUs"):
            node_count(8, 2, [8, 8], 4, "GPU")

    def test_too_few_devices(self) -> None:
        with pytest.raises(ConfigError, match=r"tensor_parallel_size times pipeline_parallel_size is 8, and the nodes"):
            node_count(8, 2, [2, 2], 1, "GPU")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, of which this process is on the first."""
    pytest.importorskip("ray", reason="Ray is an extra")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))  # of the nodes' processes
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        made.add_node(**node)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def until_cpus_are_free() -> None:
    """Those of the whole cluster."""
    import ray

    ray.init(logging_level="ERROR")
    try:
        until(lambda: ray.available_resources().get("CPU") == 2)
    finally:
        ray.shutdown()


def leaders() -> list[int]:
    """The processes that lead ranks on a node."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::NodeProcess.lead"):
            found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestTwoNodes:
    @pytest.mark.parametrize("degrees", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
    def test_text(self, checkpoint: Path, degrees: dict[str, int]) -> None:
        """That of transformers; behind it the cluster has its devices back."""
        with LLM(checkpoint, **degrees, **RAY) as llm:
            check_text(llm, checkpoint)
            assert len(leaders()) == 1
        until_cpus_are_free()
        assert leaders() == []

    def test_a_node_process_that_is_killed(self, checkpoint: Path) -> None:
        """Ray says why; its ranks end with it."""
        with LLM(checkpoint, pipeline_parallel_size=2, **RAY) as llm:
            llm.generate(PROMPTS[0], GREEDY)
            (leader,) = leaders()
            (rank,) = (int(w) for w in Path(f"/proc/{leader}/task/{leader}/children").read_text().split())
            llm.llm_engine.add_request("long", PROMPTS[0], LONG)
            os.kill(leader, signal.SIGKILL)
            with pytest.raises(RankError, match=r"node 1 \(.*\) is gone: its connection has ended \(.*actor.*died"):
                step_for_ever(llm)
        until(lambda: gone(rank))
        until_cpus_are_free()

    def test_a_rank_that_is_killed(self, checkpoint: Path) -> None:
        with LLM(checkpoint, pipeline_parallel_size=2, **RAY) as llm:
            (leader,) = leaders()
            tasks = Path(f"/proc/{leader}/task").glob("*/children")
            (rank,) = (int(word) for task in tasks for word in task.read_text().split())
            llm.llm_engine.add_request("long", PROMPTS[0], LONG)
            llm.llm_engine.step()
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(RankError, match=rf"node 1 \(.*\): rank 1 of 2 \(process {rank}\) was killed by signal"):
                step_for_ever(llm)

    def test_more_than_there_is(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match=r"is 4, and the nodes of the cluster have 1, 1 CPUs"):
            LLM(checkpoint, tensor_parallel_size=2, pipeline_parallel_size=2, **RAY)
