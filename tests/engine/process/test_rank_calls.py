"""`collective_rpc`: functions that every rank runs between two steps, wherever the ranks are, beside transformers where
they change weights."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from graphllm.config import ConfigError
from graphllm.runtime.commands.calls import RankCallError, Worker
from graphllm.runtime.ranks.rank_failure import RankError
from graphllm.weights.loading.host_array import HostArray
from tests.engine import rank_functions as functions
from tests.engine.ranks.test_eight_ranks import PROMPTS, check_dense, dense  # noqa: F401
from tests.engine.ranks.test_ranks import EAGER, pids_of
from tests.tiers import thorough
from tests.waiting import PATIENCE, gone, until

SETTINGS: dict[str, Any] = {**EAGER, "skip_tokenizer_init": True, "enable_prefix_caching": False}
REFUSED: list[tuple[Callable[[LLM], Any], type[Exception], str]] = [
    (
        lambda llm: llm.collective_rpc("count"),
        RankCallError,
        r"'count' cannot be imported .*; give package.module:name",
    ),
    (
        lambda llm: llm.collective_rpc("tests.engine.rank_functions:none"),
        RankCallError,
        "'tests.engine.rank_functions:none' cannot be imported",
    ),
    (lambda llm: llm.collective_rpc(lambda worker: 1), ConfigError, "put it at the top of a module"),
    (lambda llm: llm.collective_rpc(functions.who, args=(torch.ones(1),)), ConfigError, "an argument of .*Tensor"),
    (lambda llm: llm.collective_rpc(functions.whole_weight), RankCallError, "returned Tensor: .*; return numbers"),
    (lambda llm: llm.collective_rpc(functions.who, kwargs={"worker": 1}), RankCallError, "TypeError: .*'worker'"),
]


@pytest.mark.parametrize("ranks", [thorough(1), 2])
def test_ranks(dense: Path, tmp_path: Path, ranks: int) -> None:  # noqa: F811
    with LLM(dense, **SETTINGS, tensor_parallel_size=ranks) as llm:
        told = llm.collective_rpc(functions.who, args=(1, ("a", None)), kwargs={"b": {"c": 2.5}})
        assert [t[:3] for t in told] == [[rank, ranks, "cpu"] for rank in range(ranks)]
        assert len({t[3] for t in told}) == ranks
        assert all(t[4:] == [[1, ["a", None]], {"b": {"c": 2.5}}] for t in told)
        held = llm.collective_rpc("tests.engine.rank_functions.shapes")
        assert [h["layers.0.down"] for h in held] == [[64, 96 // ranks]] * ranks
        for call, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                call(llm)
        with pytest.raises(RankCallError, match=f"rank {ranks - 1}: ValueError: on purpose$"):
            llm.collective_rpc(functions.fail, args=(ranks - 1,))

        # Between steps of requests that go on as if nothing had been.
        for i, ids in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": ids}, params)
        found = {}
        for n in range(1, 100):
            if not llm.llm_engine.has_unfinished_requests():
                break
            assert llm.collective_rpc(functions.count) == [n] * ranks
            found |= {o.request_id: o for o in llm.llm_engine.step()}
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        for i, ids in enumerate(PROMPTS):
            expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
            assert found[f"{i}"].outputs[0].token_ids == expected[0, len(ids) :].tolist()

        # Weights that are written are those of the next step.
        for factor, name, written in ((1.5, "layers.1.ffn_norm", "post_attention_layernorm"), (0.5, "layers.0.o", "")):
            assert llm.collective_rpc(functions.scale, args=(name, factor)) == [None] * ranks
            layer = model.model.layers[int(name.split(".")[1])]
            (layer.get_submodule(written) if written else layer.self_attn.o_proj).weight.data.mul_(factor)
        model.save_pretrained(tmp_path / "changed")
        check_dense(tmp_path / "changed", llm)


@pytest.mark.thorough
def test_a_function_may_use_the_group_of_all_ranks(dense: Path) -> None:  # noqa: F811
    with LLM(dense, **SETTINGS, tensor_parallel_size=2) as llm:
        assert llm.collective_rpc(functions.sum_over_ranks, args=(1.5,), timeout=PATIENCE) == [4.5, 4.5]
        (pid,) = pids_of(llm)
        with pytest.raises(RankError, match=r"rank 1 of 2 has not answered within 0\.2 s"):
            llm.collective_rpc(functions.sleep, timeout=0.2, args=(1000,))
    until(lambda: gone(pid))


def test_weights_of_an_engine_without_torch() -> None:
    """Functions have torch's tensors all the same, in the memory that kernels read."""
    arrays = {dtype: HostArray.zeros((2, 3), dtype) for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int16")}
    worker = Worker(0, 1, "cpu", arrays, lambda work: work())
    for dtype, tensor in worker.weights.items():
        tensor.fill_(3)
        three = torch.full((2, 3), 3).to(getattr(torch, dtype))
        assert torch.equal(tensor.float(), three.float())
        assert arrays[dtype].numbers.tobytes() == three.view(torch.uint8).numpy().tobytes()


@pytest.mark.thorough
def test_cores(dense: Path) -> None:  # noqa: F811
    with LLM(dense, **SETTINGS, data_parallel_size=2) as llm:
        told = llm.collective_rpc(functions.who)
        assert [t[:2] for t in told] == [[0, 1], [0, 1]]
        assert len({t[3] for t in told}) == 2
        with pytest.raises(RankCallError, match="rank 0: ValueError: on purpose"):
            llm.collective_rpc(functions.fail, args=(0,))
        check_dense(dense, llm)


@pytest.mark.thorough
def test_the_process_of_a_core(dense: Path) -> None:  # noqa: F811
    async def ask() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs(str(dense), **SETTINGS))
        try:
            assert [t[:2] for t in await llm.collective_rpc(functions.who)] == [[0, 1]]
            with pytest.raises(RankCallError, match="on purpose"):
                await llm.collective_rpc(functions.fail, args=(0,))
            assert await llm.collective_rpc(functions.count) == [1]
        finally:
            await llm.close()

    asyncio.run(ask())


@pytest.mark.parametrize("ranks", [1, thorough(2)])
def test_profiles(dense: Path, tmp_path: Path, ranks: int) -> None:  # noqa: F811
    """Each rank's trace has every step with its size, and nothing of before and after."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with LLM(dense, **SETTINGS, tensor_parallel_size=ranks) as llm:
        llm.generate(prompt, params)
        for prefix in (f"{tmp_path}/a/", f"{tmp_path}/b-"):
            llm.start_profile(prefix)
            with pytest.raises(RankCallError, match="there is a profile already; stop_profile ends it"):
                llm.start_profile()
            llm.generate([prompt, prompt], params)
            files = llm.stop_profile()
            llm.generate(prompt, params)
            assert len(files) == len(set(files)) == ranks
            for file in files:
                assert file.startswith(prefix)
                events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
                steps = [e["name"] for e in events if "sequences" in e["name"]]
                first = f"{2 * len(PROMPTS[0])} tokens of 2 sequences"
                assert steps == [first, *["2 tokens of 2 sequences"] * 4]
                assert any(e["name"].startswith("aten::") for e in events)
        with pytest.raises(RankCallError, match="there is no profile; start_profile begins one"):
            llm.stop_profile()
        (tmp_path / "file").touch()
        with pytest.raises(RankCallError, match=r"profile_prefix is .*: no folder can be made there .*; give another"):
            llm.start_profile(f"{tmp_path}/file/")
        llm.start_profile(f"{tmp_path}/c/")  # closing ends it
    assert [*(tmp_path / "c").iterdir()] == []
