"""AsyncLLM over a stub core in a real child process (`stub_process.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from graphllm.config import ConfigError, CoreConfig, LoadConfig, ModelConfig
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from graphllm.engine.requests.request import CoreStats, QueueFullError
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.async_llm import AsyncLLM, EngineUnhealthyError
from graphllm.entrypoints.engine_client import EngineClient
from graphllm.entrypoints.streaming.streams import merge
from tests.engine.stub_process import COMMAND, CONTEXT, VOCAB, expected
from tests.waiting import PATIENCE, until_async

ENDLESS = 90  # tokens, which is for ever at the step times below
KINDS = list(RequestOutputKind)
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Token i is written "<i>", and nothing stands between tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{t}>" for t in tokens)


def sampling(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, **{"seed": 0, **options})


@contextlib.asynccontextmanager
async def serving(tokenizer: Any, settings: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An engine, closed afterwards."""
    loggers = options.pop("loggers", ())
    client = CoreClient(settings or {}, COMMAND, **{"heartbeat": 0.1, "grace": 1.0, **options})
    llm = AsyncLLM(client, tokenizer, loggers=loggers)
    async with asyncio.timeout(PATIENCE):
        try:
            yield llm
        finally:
            await llm.close()


async def everything(llm: AsyncLLM, prompt: Any, params: SamplingParams, id: str, **options: Any) -> list[Any]:
    """All outputs of a request."""
    return [output async for output in llm.generate(prompt, params, id, **options)]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the core has nothing to do."""
    while (await llm.stats()).running:
        pass


async def busy(llm: AsyncLLM, steps: int = 1) -> None:
    """Wait until the core has requests and has made so many steps."""

    async def look() -> bool:
        return llm.is_running and (stats := await llm.stats()).running > 0 and stats.steps >= steps

    await until_async(look)


@pytest.mark.parametrize("kind", KINDS)
def test_many_streams(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    async def run() -> None:
        async with serving(tokenizer) as llm:
            jobs = [
                everything(llm, [i, i, 3], sampling(10 + i % 70, output_kind=kind), f"request-{i}") for i in range(64)
            ]
            for i, outputs in enumerate(await asyncio.gather(*jobs)):
                tokens = expected([i, i, 3], 10 + i % 70)
                assert {o.request_id for o in outputs} == {f"request-{i}"}
                assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
                last = outputs[-1].outputs[0]
                assert last.finish_reason == "length"
                parts = [o.outputs[0] for o in outputs]
                if kind is DELTA:
                    assert [t for p in parts for t in p.token_ids] == tokens
                    assert "".join(p.text for p in parts) == text_of(tokens)
                else:
                    assert (last.token_ids, last.text) == (tokens, text_of(tokens))
                if kind is FINAL:
                    assert len(outputs) == 1

    asyncio.run(run())


def test_text_prompts_short_and_long(tokenizer: Tokenizer) -> None:
    """A long one is tokenized in a thread."""

    async def run() -> None:
        async with serving(tokenizer) as llm:
            for prompt, ids in (("<5> <7>", [5, 7]), ("<5>" + " " * 10_000 + "<7>", [5, 7])):
                (output,) = await everything(llm, prompt, sampling(3, output_kind=FINAL), "a")
                assert output.prompt_token_ids == ids
                assert output.outputs[0].token_ids == expected(ids, 3)

    asyncio.run(run())


def test_completions_of_one_request(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer) as llm:
            outputs = await everything(llm, [4], sampling(20, n=3, seed=11), "a")
            found = {c.index: (c.token_ids, c.finish_reason) for c in outputs[-1].outputs}
            assert found == {i: (expected([4], 20, 11 + i), "length") for i in range(3)}

    asyncio.run(run())


@pytest.mark.parametrize("way", ["break", "cancel", "aclose"])
def test_leaving_a_stream_aborts_it_and_frees_its_id(tokenizer: Tokenizer, way: str) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"step": 0.05}) as llm:
            if way == "cancel":
                job = asyncio.create_task(everything(llm, [1], sampling(ENDLESS), "a"))
                await busy(llm, 0)
                job.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await job
            elif way == "break":
                async for _ in llm.generate([1], sampling(ENDLESS), "a"):
                    break
                for _ in range(9):
                    await asyncio.sleep(0)  # the loop's turns to close what was left
            else:
                stream = llm.generate([1], sampling(ENDLESS), "a")
                await anext(stream)
                await stream.aclose()
            # The news of the abort must not end the next request of that id.
            outputs = await everything(llm, [2], sampling(4), "a")
            assert outputs[-1].outputs[0].token_ids == expected([2], 4)
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert (await llm.stats()).steps < ENDLESS
            assert (await llm.stats()).running == 0

    asyncio.run(run())


def test_abort_by_id(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"step": 0.05}) as llm:
            jobs = [asyncio.create_task(everything(llm, [i], sampling(ENDLESS), str(i))) for i in range(3)]
            await busy(llm, 2)
            await llm.abort("0")
            await llm.abort(["1", "2", "unknown"])
            for i, outputs in enumerate(await asyncio.gather(*jobs)):
                last = outputs[-1].outputs[0]
                assert last.finish_reason == "abort"
                assert last.token_ids == expected([i], len(last.token_ids))
                assert len(last.token_ids) < ENDLESS

    asyncio.run(run())


def test_stop_strings_end_the_request_in_the_core(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"step": 0.05}) as llm:
            tokens = expected([1], ENDLESS)
            stop = text_of(tokens[4:6])[1:]
            outputs = await everything(llm, [1], sampling(ENDLESS, stop=stop), "a")
            last = outputs[-1].outputs[0]
            assert (last.text, last.finish_reason, last.stop_reason) == (text_of(tokens[:4]) + "<", "stop", stop)
            await idle(llm)
            assert (await llm.stats()).steps < ENDLESS

    asyncio.run(run())


def test_mistakes_are_raised_before_the_core_hears_of_them(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer) as llm:
            with pytest.raises(ConfigError, match="prompt is empty"):
                await everything(llm, [], sampling(3), "a")
            with pytest.raises(ConfigError, match=f"prompt has {CONTEXT} tokens"):
                await everything(llm, [1] * CONTEXT, sampling(3), "a")
            with pytest.raises(ConfigError, match="structured_outputs: not available"):
                await everything(llm, [1], SamplingParams.from_fields({"structured_outputs": {"regex": "a"}}), "a")
            assert (await llm.stats()).steps == 0
            assert (await everything(llm, [1], sampling(3), "a"))[-1].finished  # the id is free

    asyncio.run(run())


def test_an_id_is_unique_while_it_runs(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"step": 0.05}) as llm:
            stream = llm.generate([1], sampling(8), "a")
            await anext(stream)
            with pytest.raises(ConfigError, match="'a' is already running"):
                await everything(llm, [2], sampling(3), "a")
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].token_ids == expected([1], 8)

    asyncio.run(run())


def test_a_full_queue(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"queue": 2, "step": 0.02}) as llm:
            first = asyncio.create_task(everything(llm, [1], sampling(40), "first"))
            await busy(llm, 0)
            with pytest.raises(QueueFullError, match="requests wait; try again later"):
                await everything(llm, [2], sampling(40, n=2), "two")
            assert (await everything(llm, [2], sampling(4), "one"))[-1].finished
            assert (await first)[-1].outputs[0].token_ids == expected([1], 40)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["exception", "signal"])
def test_death_is_raised_in_every_stream_and_afterwards(tokenizer: Tokenizer, how: str) -> None:
    settings = {"step": 0.02, "fail_at": 20 if how == "exception" else -1}
    reason = "the stub fails as told" if how == "exception" else "killed by signal 9"

    async def run() -> None:
        async with serving(tokenizer, settings) as llm:
            jobs = [asyncio.create_task(everything(llm, [i], sampling(ENDLESS), str(i))) for i in range(8)]
            await busy(llm)
            assert not llm.errored
            await llm.check_health()
            if how == "signal":
                os.kill(llm._client.pid, signal.SIGKILL)
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            for end in [*ends, llm.dead_error]:
                assert isinstance(end, EngineDeadError)
                assert end.cause.kind == how
                assert reason in str(end)
            with pytest.raises(EngineDeadError, match=reason):
                await everything(llm, [1], sampling(3), "late")
            with pytest.raises(EngineDeadError, match=reason):
                await llm.check_health()
            assert llm.errored
            assert not llm.is_running

    asyncio.run(run())


def test_a_stuck_core_is_not_healthy(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"hang_at": 2}, stuck=0.5, grace=0.3) as llm:
            job = asyncio.create_task(everything(llm, [1], sampling(9), "a"))
            await until_async(lambda: llm.health().state == "stuck")
            with pytest.raises(EngineUnhealthyError, match="stuck"):
                await llm.check_health()
            assert llm.is_running
            assert not job.done()
            llm.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await job
            assert not llm.errored
            assert not llm.is_running

    asyncio.run(run())


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, DELTA])
def test_a_slow_reader_gets_everything_in_few_outputs(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"step": 0.002}) as llm:
            params = sampling(ENDLESS, output_kind=kind, n=2)
            outputs = []
            async for output in llm.generate([1], params, "a"):
                outputs.append(output)
                await idle(llm)  # meanwhile all of the rest is made
            assert len(outputs) < 20
            for index in (0, 1):
                parts = [c for o in outputs for c in o.outputs if c.index == index]
                tokens = [t for p in parts for t in p.token_ids] if kind is DELTA else parts[-1].token_ids
                text = "".join(p.text for p in parts) if kind is DELTA else parts[-1].text
                assert (tokens, text) == (expected([1], ENDLESS, index), text_of(expected([1], ENDLESS, index)))
                assert parts[-1].finish_reason == "length"

    asyncio.run(run())


def test_merged_deltas() -> None:
    def output(completions: list[CompletionOutput], finished: bool, prompt_logprobs: Any = None) -> RequestOutput:
        return RequestOutput("a", None, [1], prompt_logprobs, completions, finished, RequestMetrics(0.0))

    one, two, three = ({i: Logprob(-float(i))} for i in (1, 2, 3))
    older = output([CompletionOutput(1, "x", [1], -1.0, [one])], False, [None])
    newer = output(
        [CompletionOutput(0, "a", [5]), CompletionOutput(1, "yz", [2, 3], -6.0, [two, three], "stop", "z")], True
    )
    found = merge(older, newer)
    assert found.outputs == [
        CompletionOutput(0, "a", [5]),
        CompletionOutput(1, "xyz", [1, 2, 3], -6.0, [one, two, three], "stop", "z"),
    ]
    assert found.finished
    assert found.prompt_logprobs == [None]


@pytest.mark.thorough
def test_a_large_step_lets_others_run_in_between(tokenizer: Tokenizer) -> None:
    """The updates of 1,000 requests come in one message; no turn of the event loop detokenizes more than 128."""
    turn = 0
    work: Counter[int] = Counter()

    class Watched:
        def step(self, ids: Any) -> str:
            work[turn] += 1
            return text_of(list(ids))

        def rest(self) -> str:
            return ""

    class Watching(Tokenizer):
        def detokenizer(self, *_: Any) -> Any:
            return Watched()

    watching = Watching.__new__(Watching)
    watching.__dict__.update(tokenizer.__dict__)

    async def clock() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def run() -> None:
        async with serving(watching, {"step": 1.0}) as llm:
            await llm.start()
            jobs = [asyncio.create_task(everything(llm, [1], sampling(3), str(i))) for i in range(1000)]
            counting = asyncio.create_task(clock())
            await asyncio.gather(*jobs)
            counting.cancel()

    asyncio.run(run())
    assert sum(work.values()) == 3000
    assert max(work.values()) == 128


def test_a_defect_of_the_front_ends_the_streams(tokenizer: Tokenizer) -> None:
    class Broken(Tokenizer):
        def detokenizer(self, *_: Any) -> Any:
            class Detokenizer:
                def step(self, ids: Any) -> str:
                    raise ZeroDivisionError("as told")

            return Detokenizer()

    broken = Broken.__new__(Broken)
    broken.__dict__.update(tokenizer.__dict__)

    async def run() -> None:
        async with serving(broken, {"step": 0.02}) as llm:
            ends = await asyncio.gather(
                *(everything(llm, [1], sampling(9), str(i)) for i in range(3)), return_exceptions=True
            )
            for end in ends:
                assert isinstance(end, EngineDeadError)
                assert "in the front: ZeroDivisionError: as told" in str(end)
                assert "in step" in end.cause.traceback
            with pytest.raises(EngineDeadError, match="in the front"):
                await everything(llm, [1], sampling(3), "late")

    asyncio.run(run())


def test_a_failed_start_is_told_to_all_who_wait(tokenizer: Tokenizer) -> None:
    async def run(load: str, error: type[Exception], message: str) -> None:
        async with serving(tokenizer, {"load": load}) as llm:
            jobs = [everything(llm, [1], sampling(3), str(i)) for i in range(3)]
            for end in await asyncio.gather(*jobs, return_exceptions=True):
                assert isinstance(end, error)
                assert message in str(end)
            assert not llm.is_running

    asyncio.run(run("config", ConfigError, "kv cache: too small"))
    asyncio.run(run("error", EngineDeadError, "RuntimeError: no weights here"))


def test_giving_up_the_first_request_does_not_end_the_start(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer) as llm:
            first = asyncio.create_task(everything(llm, [1], sampling(3), "a"))
            await asyncio.sleep(0)  # it has begun
            first.cancel()
            assert (await everything(llm, [1], sampling(3), "b"))[-1].outputs[0].token_ids == expected([1], 3)

    asyncio.run(run())


def test_close_finishes_streams_when_it_may_wait(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer, {"step": 0.02}) as llm:
            job = asyncio.create_task(everything(llm, [1], sampling(50), "a"))
            await busy(llm, 0)
            closing = asyncio.create_task(llm.close(drain_timeout=100))
            await asyncio.sleep(0)  # it has begun
            with pytest.raises(EngineDeadError, match="shutting down"):
                await everything(llm, [1], sampling(3), "late")
            await closing
            assert (await job)[-1].outputs[0].token_ids == expected([1], 50)
            with pytest.raises(EngineDeadError, match="shut down"):
                await everything(llm, [1], sampling(3), "later")

    asyncio.run(run())


def test_the_tokenizer_and_the_prefix_cache(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer) as llm:
            assert await llm.get_tokenizer() is tokenizer
            assert await llm.reset_prefix_cache()

    asyncio.run(run())


def test_the_real_core_says_what_transformers_says(checkpoint: Path, eager_artifact: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    prompts = [[3, 7, 9, 11, 30 + i] for i in range(6)]  # more than run at once
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=20, max_new_tokens=20
        )
        wanted.append(made[0, len(prompt) :].tolist())

    async def run() -> None:
        settings = CoreConfig(ModelConfig(str(checkpoint)), LoadConfig(str(eager_artifact), threads=1))
        llm = AsyncLLM(CoreClient(settings), Tokenizer.from_folder(checkpoint))
        params = sampling(20, temperature=0, ignore_eos=True, output_kind=FINAL)
        try:
            jobs = (everything(llm, prompt, params, str(i)) for i, prompt in enumerate(prompts))
            found = await asyncio.gather(*jobs)
        finally:
            await llm.close()
        assert [outputs[0].outputs[0].token_ids for outputs in found] == wanted

    asyncio.run(run())


# --- under vLLM's names


def test_a_front_needs_an_engine_client(tokenizer: Tokenizer) -> None:
    llm: EngineClient = AsyncLLM(CoreClient({}, COMMAND), tokenizer)
    assert isinstance(llm, EngineClient)
    assert not isinstance(tokenizer, EngineClient)


def test_arguments_of_vllm(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with serving(tokenizer) as llm:
            stream = llm.generate(prompt=[5], sampling_params=sampling(3), request_id="a", lora_request=None)
            found = [output async for output in stream]
            assert found[-1].outputs[0].token_ids == expected([5], 3)
            with pytest.raises(ConfigError, match="lora_request is 1: give a LoRARequest"):
                await everything(llm, [5], sampling(3), "b", lora_request=1)

    asyncio.run(run())


def test_loggers_are_told(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine lives, and no longer."""
    monkeypatch.setattr("graphllm.entrypoints.stat_loggers.SECONDS", 0.02)
    told: list[str] = []

    class Logger:
        def record(self, scheduler_stats: CoreStats, iteration_stats: None, *, engine_idx: int) -> None:
            told.append("record")

        def log(self) -> None:
            told.append("log")

    async def run() -> None:
        async with serving(tokenizer, loggers=[Logger()]) as llm:
            await everything(llm, [5], sampling(3), "a")
            await until_async(lambda: len(told) >= 6)
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nobody is left to tell

    asyncio.run(run())
    assert told[:4] == ["record", "log"] * 2
