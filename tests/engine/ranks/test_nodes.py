"""An engine whose ranks are on several machines gives what one process gives. The machines here are processes that
reach each other over TCP alone; `test_ray_nodes.py` has them from a Ray cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaForCausalLM

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError, CoreConfig, LoadConfig, ModelConfig
from graphllm.loading.core.node_main import artifact_files, preparer
from graphllm.runtime.ranks.node_messages import Begin
from graphllm.runtime.ranks.rank_failure import RankError
from tests.artifacts import artifact_of
from tests.engine.ranks.test_ranks import EAGER, PROMPTS
from tests.waiting import PATIENCE, gone, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Node:
    """`graphllm serve --headless` on this machine."""

    def __init__(self, checkpoint: Path, log: Path, rank: int = 1, nodes: int = 2) -> None:
        self.port, self.log = free_port(), log
        options = ["--nnodes", str(nodes), "--node-rank", str(rank), "--master-port", str(self.port)]
        command = [sys.executable, "-m", "graphllm.cli", "serve", str(checkpoint), "--headless", *options]
        with log.open("w") as err:
            self.process = subprocess.Popen([*command, "--pipeline-parallel-size", str(nodes)], stderr=err)

    @property
    def place(self) -> dict[str, Any]:
        """Settings of the engine that it belongs to."""
        return {"nnodes": 2, "master_port": self.port}

    def ranks(self) -> list[int]:
        """Processes of its ranks."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def says(self, text: str) -> None:
        """Wait until its log has it."""
        until(lambda: text in self.log.read_text(), process=self.process, what=self.log.read_text)


@pytest.fixture
def node(checkpoint: Path, tmp_path: Path) -> Iterator[Node]:
    made = Node(checkpoint, tmp_path / "log")
    yield made
    made.process.kill()
    made.process.wait()


def expected(checkpoint: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers continues them with."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def check_text(llm: LLM, checkpoint: Path) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    prompts = [list(o.prompt_token_ids) for o in outputs]
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected(checkpoint, prompts, 12)


def step_for_ever(llm: LLM) -> None:
    """Until something is raised. Of a request that is done before, a look at how the engine is."""
    while True:
        llm.llm_engine.step()
        llm.llm_engine.core.check_health()


def test_stages_on_two_nodes(checkpoint: Path, node: Node) -> None:
    """The text is that of transformers. When the other node's rank is killed the error says whose it was, at once; the
    node itself stays for the next engine."""
    with LLM(checkpoint, pipeline_parallel_size=2, **node.place, **EAGER) as llm:
        check_text(llm, checkpoint)
        (pid,) = node.ranks()
        llm.llm_engine.add_request("long", PROMPTS[0], LONG)
        for _ in range(4):
            llm.llm_engine.step()
        os.kill(pid, signal.SIGKILL)
        told = rf"node 1 \({socket.gethostname()}\): rank 1 of 2 \(process {pid}\) was killed by signal 9 \(SIGKILL\)"
        with pytest.raises(RankError, match=told):
            step_for_ever(llm)
    until(lambda: gone(pid))
    node.says("node 1 waits for an engine at 127.0.0.1")
    assert node.process.poll() is None
    assert node.ranks() == []


@pytest.mark.slow
def test_a_matrix_divided_among_nodes(checkpoint: Path, node: Node) -> None:
    """Slow on real networks, and right. One node serves one engine after the other."""
    for _ in range(2):
        with LLM(checkpoint, tensor_parallel_size=2, **node.place, **EAGER) as llm:
            check_text(llm, checkpoint)
        node.says("the engine has ended")


def engine_process(checkpoint: Path, node: Node) -> subprocess.Popen[bytes]:
    """One that generates for ever once it is told to go on."""
    program = (
        "import sys; from graphllm import LLM, SamplingParams;"
        f"llm = LLM({str(checkpoint)!r}, pipeline_parallel_size=2, **{node.place!r}, **{EAGER!r});"
        "print('ready', flush=True); sys.stdin.readline();"
        "[llm.generate('hello', SamplingParams(max_tokens=60, ignore_eos=True)) for _ in range(10000)]"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    engine = subprocess.Popen([sys.executable, "-c", program], **pipes)
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"ready\n"
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (signal.SIGKILL, r"node 1 \(.*\) is gone: its connection has ended"),
        (signal.SIGSTOP, r"node 1 \(.*\) has given no sign of life for \d+ seconds"),
    ],
)
def test_a_node_that_is_gone(checkpoint: Path, node: Node, sent: signal.Signals, told: str) -> None:
    """The engine's process ends, though a node that stands still has ranks that wait for it, and it for them."""
    engine = engine_process(checkpoint, node)
    pids = node.ranks()
    os.kill(node.process.pid, sent)
    _, err = engine.communicate(b"go on\n", timeout=PATIENCE)
    assert engine.returncode == 1
    assert re.search(f"RankError: {told}", err.decode())
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait()
    until(lambda: gone(*pids))


@pytest.mark.slow
def test_an_engine_that_is_gone(checkpoint: Path, node: Node) -> None:
    """Its node's ranks end, and the node waits for another engine."""
    engine = engine_process(checkpoint, node)
    pids = node.ranks()
    assert len(pids) == 1
    engine.kill()
    engine.wait()
    until(lambda: gone(*pids))
    node.says("the engine that this node belonged to is gone")


class TestPreparing:
    """What a node makes of the engine's settings."""

    @pytest.fixture(scope="class")
    def artifact(self, checkpoint: Path) -> CoreConfig:
        return CoreConfig(
            ModelConfig(model=str(checkpoint)), LoadConfig(artifact=str(artifact_of(checkpoint, **EAGER)))
        )

    def begin(self, config: CoreConfig, manifest: str) -> Begin:
        return Begin(1, 1, 1, 2, "", msgspec.to_builtins(config), manifest)

    def test_an_artifact_that_is_not_here_is_sent(self, artifact: CoreConfig, tmp_path: Path) -> None:
        files = artifact_files(Path(artifact.load.artifact))
        load = preparer(None)(self.begin(artifact, "another one"), lambda: files, tmp_path)
        assert load["load"]["artifact"] == str(tmp_path / "artifact")
        assert artifact_files(tmp_path / "artifact") == files
        name = next(name for name in files if name.startswith("pieces"))
        with pytest.raises(ConfigError, match=name):
            preparer(None)(self.begin(artifact, "another one"), lambda: files | {name: b"{}"}, tmp_path)

    def test_a_checkpoint_of_its_own(self, artifact: CoreConfig, tmp_path: Path) -> None:
        files = artifact_files(Path(artifact.load.artifact))
        load = preparer(tmp_path)(self.begin(artifact, "another one"), lambda: files, tmp_path)
        assert load["model"]["model"] == str(tmp_path)
        with pytest.raises(ConfigError, match=r"model: '.*/none' is not on .*; put the checkpoint there"):
            preparer(tmp_path / "none")(self.begin(artifact, "another one"), lambda: files, tmp_path)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes is 2: .*, 3, is not a multiple of it"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "node_rank is 1: the engine is on node 0"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank is 2: with nnodes 2 it must be less"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "data_parallel_size is 2: an engine with ranks",
        ),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "distributed_executor_backend is uni"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "192.0.2.77"}, "cannot listen on 192.0.2.77:29501"),
    ],
)
def test_settings_that_cannot_be(checkpoint: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(checkpoint, **settings, **EAGER)
