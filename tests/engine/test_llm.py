"""LLM over a stub core: inputs in every form, outputs in order, and nothing left behind when something goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphllm
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.llm import LLM
from tests.engine.byte_tokenizer import BOS, EOS, make
from tests.engine.stub_core import StubCore, info, log_softmax

VOCAB = 320
LOGITS = np.random.default_rng(0).normal(size=(8, VOCAB))
GREEDY = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"))


class Markov(np.ndarray):
    """[V, V, V] without its size: the next token's logits depend on the last two by a few rows."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and len(key) == 2:
            return np.asarray(self)[row_of(*key)]
        return super().__getitem__(key)


def row_of(before: int, last: int) -> int:
    return (3 * before + last) % len(LOGITS)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What a greedy request must get, without the end of a sequence."""
    known = list(prompt)
    while len(known) < len(prompt) + count:
        known.append(int(LOGITS[row_of(known[-2] if len(known) > 1 else 0, known[-1])].argmax()))
    return known[len(prompt) :]


@pytest.fixture
def core() -> StubCore:
    return StubCore(info(VOCAB), LOGITS.view(Markov))


@pytest.fixture
def llm(core: StubCore, tokenizer: Tokenizer) -> LLM:
    return LLM.from_core(core, tokenizer, SamplingParams(temperature=0, max_tokens=3))


def clean(llm: LLM, core: StubCore) -> None:
    """Nothing is left behind, and it goes on working."""
    assert core.unfinished == 0
    assert llm.llm_engine.driver.outputs.unfinished == 0
    assert llm.generate([5], GREEDY)[0].outputs[0].token_ids == greedy([5], 9)


def test_prompts_in_order(llm: LLM, core: StubCore, tokenizer: Tokenizer) -> None:
    """More than run at once, of different lengths."""
    prompts: list[Any] = ["Hello", [5, 6], {"prompt": "cat"}, {"prompt_token_ids": [7]}, "x", [9], [10], [11]]
    lengths = [3, 9, 1, 30, 2, 5, 8, 4]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n) for n in lengths])
    ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    ids[2:4] = [tokenizer.encode("cat"), [7]]
    for output, prompt, length in zip(outputs, ids, lengths, strict=True):
        (completion,) = output.outputs
        assert output.prompt_token_ids == prompt
        assert completion.token_ids == greedy(prompt, length)
        assert completion.text == tokenizer.decode(completion.token_ids).rstrip("\ufffd")
        assert (completion.finish_reason, output.finished) == ("length", True)
    assert [o.prompt for o in outputs] == ["Hello", None, "cat", None, "x", None, None, None]
    assert len({o.request_id for o in outputs}) == len(outputs)
    assert all(r.params.output_kind is RequestOutputKind.FINAL_ONLY for r in core.added)


@pytest.mark.parametrize("prompt", ["Hello", [5, 6], {"prompt": "Hello"}])
def test_one_prompt(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt)
    assert len(output.outputs[0].token_ids) == 3  # by the defaults
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_completions(llm: LLM, tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=5, seed=7, temperature=1.0, max_tokens=6, ignore_eos=True)
    (one,) = llm.generate("Hello", params)
    (again,) = llm.generate("Hello", params)
    assert [c.index for c in one.outputs] == list(range(5))
    assert [c.token_ids for c in one.outputs] == [c.token_ids for c in again.outputs]
    assert len({tuple(c.token_ids) for c in one.outputs}) == 5
    (third,) = llm.generate("Hello", SamplingParams(seed=9, max_tokens=6, ignore_eos=True))
    assert third.outputs[0].token_ids == one.outputs[2].token_ids


def test_seeds_repeat_from_start_to_start(tokenizer: Tokenizer) -> None:
    def drawn(seed: int | None) -> list[list[int]]:
        llm = LLM.from_core(StubCore(info(VOCAB), LOGITS.view(Markov)), tokenizer, seed=seed)
        return [o.outputs[0].token_ids for o in llm.generate([[5], [5]])]

    assert drawn(0) == drawn(0)
    assert drawn(0)[0] != drawn(0)[1]
    assert drawn(0) != drawn(1)
    assert drawn(None) != drawn(None)


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, prompt_logprobs=0)
    (output,) = llm.generate([5, 6, 7], params)
    first = log_softmax(LOGITS[row_of(6, 7)])
    best = np.argsort(-first)[:3].tolist()
    found = output.outputs[0].logprobs
    assert found is not None
    assert list(found[0]) == best
    assert [p.logprob for p in found[0].values()] == pytest.approx(first[best].tolist())
    assert [p.rank for p in found[0].values()] == [1, 2, 3]
    assert output.prompt_logprobs is not None
    assert [p and list(p) for p in output.prompt_logprobs] == [None, [6], [7]]
    assert output.prompt_logprobs[1][6].logprob == pytest.approx(log_softmax(LOGITS[row_of(0, 5)])[6])


def test_stop_strings(core: StubCore, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat sat on the mat", add_special_tokens=False)
    core = StubCore(info(VOCAB), script={(5,): ids, (6,): [*ids[:2], EOS]})
    llm = LLM.from_core(core, tokenizer)
    stopped, ended = llm.generate([[5], [6]], SamplingParams(stop=["sat"], max_tokens=len(ids)))
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("the cat ", "sat")
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == (tokenizer.decode(ids[:2]), "stop")
    assert core.aborted == [stopped.request_id]
    assert core.steps < len(ids)
    assert core.unfinished == 0


def test_priority(llm: LLM, core: StubCore) -> None:
    llm.generate([[i] for i in range(3, 9)], GREEDY, priority=[5, 4, 3, 2, 1, 0])
    assert [r.priority for r in core.added] == [5, 4, 3, 2, 1, 0]


def test_chat(llm: LLM, core: StubCore, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(chat, GREEDY)
    assert one.prompt == "<s>user:hi;bot:"
    assert one.prompt_token_ids[0] == BOS
    assert one.prompt_token_ids.count(BOS) == 1
    assert tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) == one.prompt
    many = llm.chat([chat, chat], GREEDY, add_generation_prompt=False, tools=[{}], chat_template_kwargs={"mood": "!"})
    assert [o.prompt for o in many] == ["<s>user:hi;!1"] * 2
    for empty in ([], [[]]):
        with pytest.raises(ConfigError, match=r"messages is \[\]: give at least one message"):
            llm.chat(empty, GREEDY)


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=True)) == 2


def test_token_ids_only(core: StubCore) -> None:
    llm = LLM.from_core(core, None)
    (output,) = llm.generate([5], GREEDY)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", greedy([5], 9))
    with pytest.raises(ConfigError, match="tokenizer: there is none"):
        llm.get_tokenizer()
    with pytest.raises(ConfigError, match=r"prompts\[0\]: prompt is text and there is no tokenizer"):
        llm.generate("a")


def test_mistakes_are_found_before_anything_runs(llm: LLM, core: StubCore) -> None:
    for prompts, params, priority, message in [
        ([[5], [VOCAB]], GREEDY, None, r"prompts\[1\]: prompt has token id 320"),
        ([[5], [6]], [GREEDY, SamplingParams(logprobs=99)], None, r"prompts\[1\]: logprobs is 99"),
        ([[5], [6]], [GREEDY], None, "sampling_params has 1 entries and there are 2 prompts: give one for each"),
        ([[5], [6]], GREEDY, [1], "priority has 1 entries and there are 2 prompts"),
    ]:
        with pytest.raises(ConfigError, match=f"^{message}"):
            llm.generate(prompts, params, priority=priority)  # type: ignore[arg-type]
    assert core.added == []
    clean(llm, core)


def test_a_request_that_the_core_refuses(llm: LLM, core: StubCore) -> None:
    core.refused = {"1_2"}  # in the middle of the third request's completions
    with pytest.raises(ConfigError, match="1_2: refused"):
        llm.generate([[5], [6], [7], [8]], SamplingParams(n=3))
    assert len(core.added) == 7
    clean(llm, core)


def test_an_interrupt_in_a_step(llm: LLM, core: StubCore) -> None:
    core.failing[3] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(8)], GREEDY)
    assert len(core.aborted) == 8
    clean(llm, core)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C as in a terminal; a process started in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM, core: StubCore, monkeypatch: pytest.MonkeyPatch) -> None:
    step, ended = core.step, []

    def pressed() -> Any:
        if core.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        news = step()
        ended.append(core.steps)
        return news

    monkeypatch.setattr(core, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], GREEDY)
    assert ended == [1, 2, 3, 4]  # the third was finished; the fourth ends what was aborted
    assert sorted(core.aborted) == ["0", "1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(core, "step", step)
    clean(llm, core)


@pytest.mark.usefixtures("default_sigint")
def test_a_second_ctrl_c_goes_through(llm: LLM, core: StubCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck() -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was swallowed")

    monkeypatch.setattr(core, "step", stuck)
    monkeypatch.setattr(core, "abort", lambda ids: core.waiting.clear())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5], GREEDY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads(llm: LLM) -> None:
    """Signals belong to the main thread; elsewhere there is nothing to hold back."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate([5], GREEDY)))
    thread.start()
    thread.join()
    assert found[0].outputs[0].token_ids == greedy([5], 9)


def test_a_broken_core(llm: LLM, core: StubCore) -> None:
    core.failing[2] = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([[5], [6]], GREEDY)
    assert core.steps == 2  # it is not stepped again
    assert llm.llm_engine.driver.outputs.unfinished == 0


def test_close(core: StubCore, tokenizer: Tokenizer) -> None:
    with LLM.from_core(core, tokenizer) as llm:
        assert llm.reset_prefix_cache() is True
        assert llm.get_tokenizer() is tokenizer
        assert not core.closed
    assert core.closed


@pytest.mark.parametrize("name", ["encode", "embed", "classify", "reward", "score"])
def test_vectors_of_a_model_without(llm: LLM, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: not supported; the model generates text; use generate or chat"):
        getattr(llm, name)(*["a"] * (2 if name == "score" else 1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "/nowhere"}, ConfigError, "model: /nowhere is not a folder"),
        ({"no_such_option": 2}, ConfigError, "no_such_option is 2: not supported; leave it out$"),
        ({"artifact": "/nowhere", "target": "cpu"}, ConfigError, "/nowhere"),
    ],
)
def test_what_cannot_be_loaded(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(**arguments)


# --- the package


def test_public_names() -> None:
    assert graphllm.LLM is LLM
    assert graphllm.SamplingParams is SamplingParams
    assert graphllm.BeamSearchParams is BeamSearchParams
    assert graphllm.RequestOutputKind is RequestOutputKind
    assert {"StructuredOutputsParams", "RequestOutput", "CompletionOutput", "AsyncLLM"} < set(graphllm.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = graphllm.Nothing


def test_imports_stay_light(tmp_path: Path) -> None:
    code = """
import sys
import graphllm
assert not {"msgspec", "numpy", "torch"} & set(sys.modules)
from graphllm import LLM, CompletionOutput, RequestOutput, SamplingParams
assert not {"torch", "tokenizers", "transformers", "jinja2", "zmq", "llguidance", "rich"} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    command = [sys.executable, "-X", "importtime", "-c", "from graphllm.cli import main; main()", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "graphllm.cli" in imported
    assert "torch" not in imported
