"""What users see of updates: whole characters only, text cut at stop strings, log-probabilities, merged completions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import CompletionOutput, Logprob, OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.request import EngineCoreOutput, PositionLogprobs
from graphllm.engine.requests.text import Tokenizer
from tests.engine.byte_tokenizer import BOS, END, EOS, make
from tests.engine.stub_core import info
from tests.tiers import draws

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = "Hello world"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def start(tokenizer: Tokenizer) -> Any:
    """start(id="r", **fields): an OutputProcessor that expects one request, the ids of whose text are given by ids."""

    def begin(id: str = "r", **fields: Any) -> OutputProcessor:
        outputs = OutputProcessor(tokenizer)
        add(outputs, tokenizer, id, **fields)
        return outputs

    return begin


def add(outputs: OutputProcessor, tokenizer: Tokenizer | None, id: str, prompt: Any = None, **fields: Any) -> None:
    processor = Processor(tokenizer, info(320))
    prompt = prompt or (PROMPT if tokenizer else [5, 6])
    outputs.add(processor.make(prompt, SamplingParams(**{"max_tokens": None, **fields}), id))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def updates(tokens: list[int], sizes: Iterable[int] = (), end: str = "length", id: str = "r") -> list[EngineCoreOutput]:
    """One of each size, then of one token each; the last one ends it."""
    found, at = [], 0
    for size in [*sizes, *([1] * len(tokens))]:
        if at < len(tokens):
            found.append(EngineCoreOutput(id, tokens[at : at + size]))
            at += size
    if not found:
        found.append(EngineCoreOutput(id, []))
    found[-1].finish_reason = end
    return found


def run(outputs: OutputProcessor, news: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
    """Outputs and aborts, one update a step."""
    found: list[RequestOutput] = []
    aborts: list[str] = []
    for update in news:
        processed = outputs.process([update])
        found += processed.outputs
        aborts += processed.aborts
    return found, aborts


def only(outputs: list[RequestOutput]) -> CompletionOutput:
    """The completion of the last output."""
    (completion,) = outputs[-1].outputs
    return completion


# --- text, against plain decoding and searching


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text after 0, 1, ... tokens, up to the last whole character."""
    return [tokenizer.decode(ids[:n]).removesuffix("\ufffd") for n in range(len(ids) + 1)]


def expected(texts: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """Text, tokens and stop string of the first token after min_tokens that completes one."""
    for n in range(min_tokens + 1, len(texts)):
        text, old = texts[n], len(texts[n - 1])
        ends = range(old + 1, len(text) + 1)
        matches = [(e - len(s), i) for i, s in enumerate(stops) for e in ends if text[:e].endswith(s)]
        if matches:
            at, i = min(matches)
            return text[: at + len(stops[i]) * include], n, stops[i]
    return texts[-1], len(texts) - 1, None


def held(text: str, stops: list[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a stop string."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


LETTERS = st.text("aabbSTOP é漢🙂🙃", max_size=24)


@settings(deadline=None, max_examples=draws(100, 300))
@given(data=st.data())
def test_any_text_with_any_stop_strings(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(LETTERS)
    if data.draw(st.booleans()):
        ids = ids_of(tokenizer, text)
    else:  # no merges: every byte is a token
        ids = [i for byte in _byte_characters(text) for i in [tokenizer._backend.token_to_id(byte)]]
    assert tokenizer.decode(ids) == text
    parts = st.sampled_from(
        [text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 5, len(text)) + 1)] or ["x"]
    )
    stops = data.draw(st.lists(st.one_of(parts, st.text("abSTOP🙂", min_size=1, max_size=4)), max_size=3))
    include = data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, max(0, min(len(ids), 30))))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=8))
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}

    texts = texts_of(tokenizer, ids)
    wanted, count, stop = expected(texts, stops, include, min_tokens)
    for kind in RequestOutputKind:
        outputs = OutputProcessor(tokenizer)
        add(outputs, tokenizer, "r", output_kind=kind, **params)
        news = updates(ids, sizes)
        found, aborts = run(outputs, news)
        last = only(found)
        completions = [o.outputs[0] for o in found]
        assert not any("\ufffd" in c.text for c in completions)
        if kind is DELTA:
            assert "".join(c.text for c in completions) == wanted
            assert [t for c in completions for t in c.token_ids] == ids[:count]
        else:
            assert (last.text, last.token_ids) == (wanted, ids[:count])
        if kind is CUMULATIVE:
            for c in completions[:-1]:
                so_far = texts[len(c.token_ids)]
                assert c.text == so_far[: len(so_far) - held(so_far, [] if include else stops)]
        if kind is FINAL_ONLY:
            assert len(found) == 1
        assert (last.finish_reason, last.stop_reason) == ("length" if stop is None else "stop", stop)
        assert [o.finished for o in found] == [False] * (len(found) - 1) + [True]
        assert aborts == (["r"] if stop is not None and count <= len(ids) - len(news[-1].tokens) else [])
        assert outputs.unfinished == 0


def _byte_characters(text: str) -> str:
    """The characters that byte-level tokenizers write for the bytes of a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return "".join(names[b] for b in text.encode())


@settings(deadline=None, max_examples=draws(66, 200))
@given(
    prompt=st.lists(st.integers(0, 319), min_size=1, max_size=9),
    ids=st.lists(st.integers(0, 319), max_size=12),
    skip=st.booleans(),
)
@example(prompt=[175, 256, 250], ids=[227, 67], skip=True)  # the output begins within a character
def test_any_tokens_in_pieces_or_at_once(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> None:
    """Bytes that are no text, and special tokens: what is decoded at the end is what would have come in pieces."""
    text = {}
    for kind in RequestOutputKind:
        outputs = OutputProcessor(tokenizer)
        add(outputs, tokenizer, "r", prompt, output_kind=kind, skip_special_tokens=skip)
        found, _ = run(outputs, updates(ids))
        text[kind] = "".join(o.outputs[0].text for o in found) if kind is DELTA else only(found).text
    assert text[CUMULATIVE] == text[DELTA] == text[FINAL_ONLY]


def test_a_decoder_that_takes_text_back(tmp_path: Path) -> None:
    """Text of the prompt that the first new token would change was given out already."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    backend.save(str(tmp_path / "tokenizer.json"))
    rewriting = Tokenizer.from_folder(tmp_path)
    assert rewriting.decode([0, 1]) == "xyz"
    for kind in RequestOutputKind:
        outputs = OutputProcessor(rewriting)
        outputs.add(Processor(rewriting, info(2)).make([0], SamplingParams(output_kind=kind), "r"))
        assert only(run(outputs, updates([1]))[0]).text == "b"


def test_output_that_ends_within_a_character(start: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a🙂")[:-1]
    assert tokenizer.decode(ids) != "a"
    for kind in RequestOutputKind:
        found, _ = run(start(output_kind=kind), updates(ids))
        assert "".join(o.outputs[0].text for o in (found if kind is DELTA else found[-1:])) == "a\ufffd"


@settings(deadline=None, max_examples=draws(150, 2000))
@given(data=st.data())
def test_any_tokens_behind_any_prompt(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """Prompts and outputs that begin and end within characters, with special and padding tokens: the text is what the
    tokenizer makes of all tokens, without what it makes of the prompt, however it is asked for."""
    pieces = st.sampled_from(["a", " the", "é", "🙂", "日本", "\ufffd", "<s>", "</s>", "<|im_end|>", "ST"])
    texts = st.lists(pieces, min_size=1, max_size=6).map("".join).map(lambda text: ids_of(tokenizer, text))
    tokens = texts | st.lists(st.integers(0, 319), min_size=1, max_size=12)
    cut = st.integers(0, 3)
    prompt = data.draw(tokens)
    prompt = prompt[: max(1, len(prompt) - data.draw(cut))]
    ids = [*data.draw(tokens)[data.draw(cut) :], *data.draw(tokens)]
    stops = data.draw(st.lists(st.sampled_from(["a", "é", "🙂", "\ufffd", "ST", "the"]), max_size=2, unique=True))
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    known = before if whole.startswith(before) else before.rstrip("\ufffd")  # the output completes its last character
    assert whole.startswith(known)
    text = whole[len(known) :]
    ends = [text.find(stop) for stop in stops if stop in text]
    for kind in RequestOutputKind:
        outputs = OutputProcessor(tokenizer)
        add(outputs, tokenizer, "r", prompt, stop=stops, output_kind=kind, ignore_eos=True)
        found, _ = run(outputs, updates(ids, data.draw(st.lists(st.integers(1, 4), max_size=3))))
        given = "".join(o.outputs[0].text for o in found) if kind is DELTA else only(found).text
        assert given == text[: min(ends, default=len(text))], (kind, prompt, ids, stops)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stop_strings_with_special_tokens(start: Any, tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    """They are found though the text leaves special tokens out."""
    ids = ids_of(tokenizer, "the<s> cat\n</s>x")

    def text(**fields: Any) -> tuple[str, str | None, Any]:
        found, _ = run(start(output_kind=kind, ignore_eos=True, **fields), updates(ids))
        last = only(found)
        whole = "".join(o.outputs[0].text for o in found) if kind is DELTA else last.text
        return whole, last.finish_reason, last.stop_reason

    assert text() == ("the cat\nx", "length", None)
    assert text(stop="</s>") == ("the cat\n", "stop", "</s>")
    assert text(stop=["\n</s>"]) == ("the cat", "stop", "\n</s>")
    assert text(stop=["the<s>"]) == ("", "stop", "the<s>")
    assert text(stop=["<s></s>", "x"]) == ("the cat\n", "stop", "x")
    assert text(stop="<s>", min_tokens=len(ids) - 1) == ("the cat\nx", "length", None)
    assert text(stop="</s>", include_stop_str_in_output=True)[0] == "the cat\n</s>"


def test_the_first_stop_string_wins(start: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "the cat sat")
    for stops, text, reason in [
        (["sat", "cat"], "the ", "cat"),
        (["at", "cat"], "the ", "cat"),  # both end with the same token; the earlier begins earlier
        (["ca", "cat"], "the ", "ca"),  # as given
        (["cat", "ca"], "the ", "cat"),
    ]:
        found, aborts = run(start(stop=stops), updates(ids))
        last = only(found)
        assert (last.text, last.finish_reason, last.stop_reason, aborts) == (text, "stop", reason, ["r"])


def test_a_stop_string_before_min_tokens_does_not_count_later(start: Any, tokenizer: Tokenizer) -> None:
    """Though what it began was held back, because a longer one might have come of it."""
    ids = ids_of(tokenizer, "q ST.")
    found, _ = run(start(stop=["ST", "STOP"], min_tokens=len(ids) - 1), updates(ids))
    assert (only(found).text, only(found).finish_reason) == ("q ST.", "length")


# --- ends


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize(
    ("fields", "token", "text", "reason"),
    [
        ({}, EOS, "the cat", None),
        ({}, END, "the cat", None),
        ({"stop_token_ids": [EOS]}, EOS, "the cat", None),  # it is the end of the sequence all the same
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, "the cat", EOS),
        ({"stop_token_ids": [70]}, 70, "the cat", 70),
        ({"stop_token_ids": [70], "include_stop_str_in_output": True}, 70, "the cat{}", 70),
        ({"stop_token_ids": [70], "skip_special_tokens": False}, 70, "the cat", 70),
        ({"include_stop_str_in_output": True}, EOS, "the cat", None),  # special, so it is left out
        ({"skip_special_tokens": False}, EOS, "the cat", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, EOS, "the cat</s>", None),
    ],
)  # fmt: skip
def test_stop_tokens(
    start: Any,
    tokenizer: Tokenizer,
    kind: RequestOutputKind,
    fields: dict[str, Any],
    token: int,
    text: str,
    reason: Any,
) -> None:
    ids = [*ids_of(tokenizer, "the cat"), token]
    found, aborts = run(start(output_kind=kind, **fields), updates(ids, end="stop"))
    whole = "".join(o.outputs[0].text for o in (found if kind is DELTA else found[-1:]))
    assert whole == text.format(tokenizer.decode([70]))
    assert (only(found).finish_reason, only(found).stop_reason, aborts) == ("stop", reason, [])
    assert [t for o in (found if kind is DELTA else found[-1:]) for t in o.outputs[0].token_ids] == ids


def test_stop_string_in_the_last_update(start: Any, tokenizer: Tokenizer) -> None:
    """The core has ended the request already, so there is nothing to abort."""
    found, aborts = run(start(stop="at"), updates(ids_of(tokenizer, "cat"), [3]))
    assert (only(found).text, only(found).finish_reason, only(found).stop_reason, aborts) == ("c", "stop", "at", [])


def test_held_text_comes_with_the_end(start: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "see ST")
    found, _ = run(start(stop="STOP", output_kind=DELTA), updates(ids))
    assert "".join(o.outputs[0].text for o in found) == "see ST"
    assert "ST" not in "".join(o.outputs[0].text for o in found[:-1])
    ended, _ = run(
        start(stop="STOP"), [*updates(ids)[:-1], EngineCoreOutput("r", ids[-1:]), EngineCoreOutput("r", [], "abort")]
    )
    assert (only(ended).text, only(ended).finish_reason) == ("see ST", "abort")


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_errors(start: Any, tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    outputs = start(output_kind=kind)
    a = ids_of(tokenizer, "a")
    found, aborts = run(
        outputs,
        [EngineCoreOutput("r", a), EngineCoreOutput("r", [], "error", error="no token"), EngineCoreOutput("r", a)],
    )
    assert found[-1].finished
    assert (only(found).finish_reason, only(found).error, aborts) == ("error", "no token", [])
    assert "".join(o.outputs[0].text for o in found[-2:] if kind is not CUMULATIVE or o.finished) == "a"
    assert outputs.process([EngineCoreOutput("r", a)]) == ([], [])


# --- requests


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_completions_are_one_request(start: Any, tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    outputs = start(n=3, output_kind=kind, stop="b")
    a, b, c = (ids_of(tokenizer, s)[0] for s in "abc")
    steps = [
        [EngineCoreOutput("1_r", [a]), EngineCoreOutput("0_r", [b])],
        [EngineCoreOutput("2_r", [c], "length"), EngineCoreOutput("1_r", [c])],
        [EngineCoreOutput("0_r", [], "abort"), EngineCoreOutput("1_r", [a], "length")],
    ]
    found = [outputs.process(step) for step in steps]
    assert [p.aborts for p in found] == [["0_r"], [], []]
    # index, text, tokens, finish reason
    first = (0, "", [b], "stop")
    second, third = (2, "c", [c], "length"), (1, "aca", [a, c, a], "length")
    views = {
        DELTA: [[first, (1, "a", [a], None)], [(1, "c", [c], None), second], [(1, "a", [a], "length")]],
        CUMULATIVE: [
            [first, (1, "a", [a], None), (2, "", [], None)],
            [first, (1, "ac", [a, c], None), second],
            [first, third, second],
        ],
        FINAL_ONLY: [[], [], [first, third, second]],
    }
    for processed, wanted in zip(found, views[kind], strict=True):
        got = [(c.index, c.text, c.token_ids, c.finish_reason) for o in processed.outputs for c in o.outputs]
        assert got == wanted
        assert [o.request_id for o in processed.outputs] == ["r"] * bool(wanted)
    assert [o.finished for p in found for o in p.outputs] == ([True] if kind is FINAL_ONLY else [False, False, True])


def test_several_requests_in_a_step(start: Any, tokenizer: Tokenizer) -> None:
    outputs = start("x", output_kind=DELTA)
    add(outputs, tokenizer, "y", output_kind=FINAL_ONLY)
    add(outputs, tokenizer, "z")
    a = ids_of(tokenizer, "a")
    processed = outputs.process([EngineCoreOutput(id, a) for id in ("z", "unknown", "y", "x")])
    assert [(o.request_id, o.outputs[0].text) for o in processed.outputs] == [("z", "a"), ("x", "a")]
    assert processed.outputs[0].prompt == PROMPT
    assert processed.outputs[0].prompt_token_ids == tokenizer.encode(PROMPT)
    assert outputs.unfinished == 3


def test_outputs_do_not_change_later(start: Any, tokenizer: Tokenizer) -> None:
    outputs = start(logprobs=0)
    a = ids_of(tokenizer, "a")
    news = EngineCoreOutput("r", a, logprobs=[PositionLogprobs(a[0], -1.0, 1, [], [])])
    first = outputs.process([news]).outputs[0].outputs[0]
    outputs.process([news])
    assert (first.text, first.token_ids, len(first.logprobs or [])) == ("a", a, 1)


def test_abort(start: Any, tokenizer: Tokenizer) -> None:
    outputs = start("x", n=2)
    add(outputs, tokenizer, "y")
    outputs.process([EngineCoreOutput("0_x", [5], "length")])
    assert outputs.abort(["x", "unknown", "x"]) == ["1_x"]
    assert outputs.process([EngineCoreOutput("1_x", [5]), EngineCoreOutput("1_x", [], "abort")]) == ([], [])
    assert outputs.unfinished == 1
    add(outputs, tokenizer, "x")  # the name is free again


def test_names_are_unique(start: Any, tokenizer: Tokenizer) -> None:
    outputs = start("x", n=2)
    for name in ("x", "1_x"):
        with pytest.raises(ConfigError, match=f"request_id: '{name}' is already running"):
            add(outputs, tokenizer, name)
    assert outputs.unfinished == 1


def test_metrics(tokenizer: Tokenizer) -> None:
    times = iter([10.0, 11.0, 12.0, 13.0])
    outputs = OutputProcessor(tokenizer, lambda: next(times))
    parsed = Processor(tokenizer, info(320)).make("a", SamplingParams(n=2), "r")
    outputs.add(parsed)
    seen = []
    for update in (
        EngineCoreOutput("0_r", []), EngineCoreOutput("0_r", [5], cached=3, scheduled=10.5),
        EngineCoreOutput("1_r", [5], "length", cached=9, scheduled=10.75),
    ):  # fmt: skip
        seen += outputs.process([update]).outputs
    seen += outputs.process([EngineCoreOutput("0_r", [], "abort")]).outputs
    m = seen[-1].metrics
    assert (m.arrival_time, m.first_token_time, m.last_token_time, m.finished_time) == (
        parsed.requests[0].arrival, 11.0, 12.0, 13.0,
    )  # fmt: skip
    assert m.first_scheduled_time == 10.5
    assert [o.num_cached_tokens for o in seen] == [0, 3, 3, 3]


# --- log-probabilities


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_logprobs(start: Any, tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    outputs = start(logprobs=2, prompt_logprobs=1, output_kind=kind)
    a, b, c = (ids_of(tokenizer, s)[0] for s in "abc")
    one = [PositionLogprobs(a, -3.0, 7, [b, c], [-0.5, -1.0])]
    two = [PositionLogprobs(b, -0.25, 1, [b, c], [-0.25, -4.0]), PositionLogprobs(c, -1.0, 2, [a, c], [-0.5, -1.0])]
    news = [
        EngineCoreOutput("r", [a], logprobs=one, prompt_logprobs=[PositionLogprobs(BOS, -2.0, 2, [b], [-1.0])]),
        EngineCoreOutput("r", [b, c], "length", logprobs=two),
    ]
    found, _ = run(outputs, news)
    first = {a: Logprob(-3.0, 7, "a", b"a", 0), b: Logprob(-0.5, 1, "b", b"b"), c: Logprob(-1.0, 2, "c", b"c")}
    second = {b: Logprob(-0.25, 1, "b", b"b", 1), c: Logprob(-4.0, 2, "c", b"c")}
    third = {c: Logprob(-1.0, 2, "c", b"c", 2), a: Logprob(-0.5, 1, "a", b"a")}
    prompt = [None, {BOS: Logprob(-2.0, 2, "<s>", b"<s>", 4), b: Logprob(-1.0, 1, "b", b"b")}]
    completions = [o.outputs[0] for o in found]
    views = {
        DELTA: [[first], [second, third]],
        CUMULATIVE: [[first], [first, second, third]],
        FINAL_ONLY: [[first, second, third]],
    }
    assert [c.logprobs for c in completions] == views[kind]
    assert [list(position) for position in completions[-1].logprobs or []][-1] == [c, a]  # the token itself first
    assert [c.cumulative_logprob for c in completions] == ([-4.25] if kind is FINAL_ONLY else [-3.0, -4.25])
    assert [o.prompt_logprobs for o in found] == ([prompt, None] if kind is DELTA else [prompt] * len(found))


def test_rank_among_equals(start: Any, tokenizer: Tokenizer) -> None:
    """Tokens of the same log-probability have places one after another, and the sampled one the rank it came with."""
    found, _ = run(
        start(logprobs=2),
        [EngineCoreOutput("r", [7], "length", logprobs=[PositionLogprobs(7, -1.0, 1, [6, 7], [-1.0, -1.0])])],
    )
    (position,) = only(found).logprobs or []
    assert [(token, p.rank) for token, p in position.items()] == [(7, 1), (6, 1)]


def test_no_logprobs_unless_asked_for(start: Any, tokenizer: Tokenizer) -> None:
    found, _ = run(start(), updates([5, 6]))
    assert (only(found).logprobs, only(found).cumulative_logprob, found[-1].prompt_logprobs) == (None, None, None)


def test_logprobs_end_with_the_stop_string(start: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "q b z")
    ranked = [PositionLogprobs(i, -math.log(n + 2), 1, [i], [-math.log(n + 2)]) for n, i in enumerate(ids)]
    found, _ = run(start(logprobs=1, stop="b"), [EngineCoreOutput("r", ids, logprobs=ranked)])
    kept = only(found)
    assert tokenizer.decode(kept.token_ids) == "q b"
    assert [list(p) for p in kept.logprobs or []] == [[i] for i in kept.token_ids]
    assert kept.cumulative_logprob == pytest.approx(-sum(math.log(n + 2) for n in range(len(kept.token_ids))))


# --- without text


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_token_ids_only(start: Any, kind: RequestOutputKind) -> None:
    none = OutputProcessor(None)
    add(none, None, "r", output_kind=kind, logprobs=1)
    for outputs in (start(detokenize=False, output_kind=kind, logprobs=1), none):
        found, _ = run(
            outputs, [EngineCoreOutput("r", [5, 6], "length", logprobs=[PositionLogprobs(5, -1.0, 1, [5], [-1.0])] * 2)]
        )
        assert (only(found).text, only(found).token_ids) == ("", [5, 6])
        assert [o.prompt for o in found] == [None if outputs is none else PROMPT]


def test_spaces_between_special_tokens(tmp_path: Path) -> None:
    """A decoder that joins tokens with spaces, as for word pieces, puts them between special tokens too."""
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<x>", "<y>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer.from_folder(tmp_path)
    ids = [1, 3, 4, 4, 1, 2, 3, 1]
    for spaces, text in ((True, " a <x> <y> <y> a b <x> a"), (False, " a <x><y><y> a b <x> a")):
        for kind in RequestOutputKind:
            outputs = OutputProcessor(words)
            params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces, output_kind=kind)
            outputs.add(Processor(words, info(5)).make([2], params, "r"))
            found, _ = run(outputs, updates(ids))
            assert "".join(o.outputs[0].text for o in (found if kind is DELTA else found[-1:])) == text
