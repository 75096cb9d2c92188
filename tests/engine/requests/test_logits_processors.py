"""Logits processors as classes: each request's state stays with it, whoever joins, leaves and moves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.logits_processors import (
    AdapterLogitsProcessor,
    BatchLimits,
    BatchUpdate,
    LogitsProcessor,
    ModelLimits,
    MoveDirectionality,
    ProcessorConfig,
    adapted,
)
from graphllm.engine.requests.options import Row
from graphllm.entrypoints.llm import LLM

CONFIG = ProcessorConfig(ModelLimits(96, 320), BatchLimits(4, 32))


class Counting(LogitsProcessor):
    """Writes into each row what the request asks for, and how often it was there since it joined."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        assert (vllm_config.model_config.get_vocab_size(), vllm_config.scheduler_config.max_num_seqs) == (320, 4)
        assert (str(device), is_pin_memory) == ("cpu", False)
        self.rows: dict[int, list[Any]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """As vLLM's documentation has it: removed, added, moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.rows[index]
        for index, params, prompt, output in batch_update.added:
            assert index not in self.rows
            assert params.extra_args is not None
            self.rows[index] = [params.extra_args["mark"], 0, prompt, output]
        for source, to, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            assert to not in self.rows
            self.rows[to] = self.rows.pop(source)
        assert sorted(self.rows) == list(range(batch_update.batch_size))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.rows)
        edited = torch.empty_like(logits)
        for index, row in self.rows.items():
            row[1] += 1
            edited[index] = torch.tensor([row[0], row[1], sum(row[2]), sum(row[3])])
        return edited


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_batches(seed: int) -> None:
    """Requests come, stay away for a step (they were preempted), go, and stand in any order, with rows of prompts
    between them. What a row gets is its request's."""
    choose = random.Random(seed)
    processor = adapted(Counting, CONFIG, torch.device("cpu"))
    lives: dict[str, dict[str, Any]] = {}
    joined: dict[str, int] = {}  # steps since it came, or came back
    for step in range(60):
        for id in [id for id in lives if choose.random() < 0.15]:
            del lives[id]
        for n in range(choose.choice((0, 0, 1, 2))):
            mark = 1000 * step + n
            lives[str(mark)] = {"mark": mark, "prompt": [choose.randrange(9)], "output": []}
        present = [id for id in lives if choose.random() < 0.9]
        choose.shuffle(present)
        rows = []
        for id in present:
            live = lives[id]
            params = SamplingParams(extra_args={"mark": live["mark"]})
            if not live["output"] and choose.random() < 0.3:
                rows.append(Row(id, live["prompt"], [], {}, params, in_prompt=True))
            rows.append(Row(id, live["prompt"], list(live["output"]), {}, params))
        before = torch.rand(len(rows), 4)
        logits = before.clone()
        processor(logits, rows)
        joined = {id: joined.get(id, 0) + 1 for id in present}
        for got, was, row in zip(logits, before, rows, strict=True):
            live = lives[row.request_id]
            own = [live["mark"], joined[row.request_id], sum(live["prompt"]), sum(live["output"])]
            assert got.tolist() == (was.tolist() if row.in_prompt else own)
        for id in present:
            lives[id]["output"].append(choose.randrange(9))


class Forbidding(AdapterLogitsProcessor):
    """Of single requests: no token of the prompt or of the output comes (again)."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("fresh", True), bool):
            raise ValueError("fresh: give True or False")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("fresh"):
            return None

        def edit(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[[*prompt, *output]] = float("-inf")
            return logits

        return edit


@pytest.mark.parametrize("processor", [Forbidding, f"{__name__}:Forbidding", f"{__name__}.Forbidding"])
def test_in_an_engine(processor: Any, checkpoint: Path, eager_artifact: Path) -> None:
    """More requests than fit into a step, some with the wish; the others get what they get without the processor."""
    prompts = [[5, 6, 7 + i] for i in range(9)]
    options: dict[str, Any] = {"model": checkpoint, "artifact": eager_artifact, "device": "cpu"}
    each = [
        SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True, extra_args={"fresh": i % 2 == 1})
        for i in range(9)
    ]
    with LLM(**options) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(prompts, each)]
    with LLM(logits_processors=[processor], **options) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, each)]
        with pytest.raises(ConfigError, match="logits_processors: fresh: give True or False"):
            llm.generate([5], SamplingParams(extra_args={"fresh": 3}))
    assert found[::2] == plain[::2]
    assert any(len({*p, *o}) < len(p) + len(o) for p, o in zip(prompts[1::2], plain[1::2], strict=True))
    assert all(len({*p, *o}) == len(p) + len(o) for p, o in zip(prompts[1::2], found[1::2], strict=True))
