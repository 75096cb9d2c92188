"""Text: encoding as transformers does it, chat templates against transformers, and streams of whole characters only."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from graphllm.config import ConfigError
from graphllm.engine.requests.text import Tokenizer

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
TEXT = ["Hello world, how are you?", "Grüße aus Köln; das Wetter ist schön.", "1 + 2 = 3 <b>x</b> & 'y'"] * 3


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte is a token, so characters are split over tokens."""
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return t


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2 and Gemma: spaces are part of words, unknown characters fall back to bytes."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    vocab = {t: i for i, t in enumerate(["<unk>", *SPECIAL, *byte_tokens, *"▁Helo,wrdab"])}
    t = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    t.add_special_tokens(SPECIAL)
    return t


def rewriting() -> tokenizers.Tokenizer:
    """Its decoder changes what stood there before when the next token comes."""
    t = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    t.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    return t


def save(folder: Path, backend: tokenizers.Tokenizer, files: dict[str, Any] | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "pad_token": "<pad>",
        "add_bos_token": False,
    }
    for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("byte"), byte_level())


@pytest.fixture(scope="module")
def streams(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    other = save(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_like())
    return [Tokenizer.from_folder(byte_folder), Tokenizer.from_folder(other)]


def hf(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_encoding_is_the_post_processors(byte_folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(byte_folder), hf(byte_folder)
    for text in ("", "Hello wörld 🙂", "<|im_start|>x</s>"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ids[0] == ours.bos_id == 0
        assert ours.encode(text, add_special_tokens=False) == ids[1:]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.vocab_size == len(theirs)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    assert len(Tokenizer.from_folder(save(tmp_path, backend)).encode("abcdefgh", add_special_tokens=False)) == 8


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (0, 1, 2, {1})),
        ({"generation_config.json": {"eos_token_id": [4, 1], "pad_token_id": 3}}, (0, 1, 2, {1, 4})),
        ({"config.json": {"eos_token_id": 4}}, (0, 1, 2, {1, 4})),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, (0, 1, 2, {1, 4})),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": 4}}, (0, 1, 2, {1, 4})),
        ({"tokenizer_config.json": {}}, (None, None, None, set())),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<|im_end|>"}}, (None, 4, None, {4})),
        (
            {
                "tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {}},
                "special_tokens_map.json": {"eos_token": "<|im_end|>"},
            },
            (None, 1, None, {1}),
        ),
        (
            {
                "tokenizer_config.json": {},
                "config.json": {"bos_token_id": 0, "eos_token_id": [3, 4], "pad_token_id": 2},
            },
            (0, 3, 2, {3, 4}),
        ),
    ],
)
def test_special_ids(tmp_path: Path, files: dict[str, Any], expected: tuple[Any, ...]) -> None:
    t = Tokenizer.from_folder(save(tmp_path, byte_level(), files))
    assert (t.bos_id, t.eos_id, t.pad_id, t.stop_ids) == expected


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_stream_gives_the_whole_text(streams: list[Tokenizer], text: str) -> None:
    for t in streams:
        ids = t.encode(text, add_special_tokens=False)
        stream = t.detokenizer()
        assert "".join(stream.step([i]) for i in ids) + stream.rest() == t.decode(ids) == t.output_text([], ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@example("\u2581")
def test_the_bytes_of_tokens_are_those_of_their_text(streams: list[Tokenizer], text: str) -> None:
    first, second = streams
    ids = first.encode(text, add_special_tokens=False)
    assert b"".join(first.token_bytes[i] for i in ids) == text.encode()
    ids = second.encode(text, add_special_tokens=False)  # writes a space before a text, and "\u2581" for each space
    expected = f" {text}".replace("\u2581", " ") if text else ""
    assert b"".join(second.token_bytes[i] for i in ids) == expected.encode()


def test_the_bytes_of_special_and_unknown_tokens(streams: list[Tokenizer]) -> None:
    for t in streams:
        assert t.token_bytes[t.special_tokens["</s>"]] == b"</s>"
        assert t.token_bytes[10**6] == b""


def test_bytes_that_break_a_row_of_others(streams: list[Tokenizer]) -> None:
    """Byte fallback: the library gives up all characters of a row for one that is broken; ours are only that one."""
    t = streams[1]
    ids = t.encode("日本", add_special_tokens=False)[1:]
    assert len(ids) == 6
    assert t.decode(ids[:4]) == "\ufffd" * 4
    stream = t.detokenizer()
    assert "".join(stream.step([i]) for i in ids[:4]) + stream.rest() == "日\ufffd" == t.output_text([], ids[:4])
    prompt = [*ids * 3, *ids[:4]]  # the end of a long row
    assert t.detokenizer(prompt).step(ids[4:]) == "本" == t.output_text(prompt, ids[4:])


def test_no_character_comes_in_parts(streams: list[Tokenizer]) -> None:
    text = "a🙂b👩‍👩‍👧é漢"
    for t in streams:
        ids = t.encode(text, add_special_tokens=False)
        assert len(ids) > len(text) + 10  # so characters are split
        stream = t.detokenizer()
        parts = [stream.step([i]) for i in ids]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)
        assert parts.count("") >= 10
        half = t.encode("a🙂", add_special_tokens=False)[:-1]
        assert t.detokenizer().step(half) == "a"  # output that ends within a character ends before it


def test_a_stream_continues_its_prompt(streams: list[Tokenizer]) -> None:
    t = streams[1]
    prompt, more = t.encode("Hello"), t.encode("world")
    assert t.decode(more) == "world"
    assert t.detokenizer(prompt).step(more) == " world"
    assert t.detokenizer(prompt * 100).step(more) == " world"


def test_special_and_unknown_ids_in_a_stream(streams: list[Tokenizer]) -> None:
    for t in streams:
        eos = t.encode("</s>", add_special_tokens=False)[-1]
        (a,) = t.encode("a", add_special_tokens=False)[-1:]
        assert t.detokenizer().step([a, eos, 10**6, a]).split() == ["aa"]
        assert "</s>" in t.detokenizer(skip_special_tokens=False).step([a, eos, a])


def test_a_decoder_that_takes_text_back(tmp_path: Path) -> None:
    t = Tokenizer.from_folder(save(tmp_path, rewriting()))
    assert t.decode([0, 1]) == "xyz"
    stream = t.detokenizer()
    assert [stream.step([i]) for i in (0, 1, 1, 0)] == ["a", "b", "b", "a"]


CHATML = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}
{{- tool | tojson }}{{ "\\n" }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" and (loop.first or messages[loop.index0 - 1].role != "tool") %}
        {{- '<|im_start|>user' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
    {%- endif %}
    {%- if message.reasoning_content is defined and enable_thinking is not false %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.content is string %}{{- message.content | trim }}{%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' }}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA2 = """{{ bos_token }}{% for message in messages %}
  {% if loop.index0 is divisibleby 2 and message.role == 'assistant' %}
    {{ raise_exception('Conversation roles must alternate') }}
  {% endif %}
  {% set ns = namespace(n=loop.index) %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
{% if message.role == 'user' %}[INST] {{ message['content'].split('\\n')[0] }} [/INST]
{% else %}
{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% endif %}
{% if ns.n > 10 %}{% break %}{% endif %}
{% endfor %}
"""

DATED = (
    "{{ strftime_now('%Y') }}|{{ messages | tojson }}|{{ documents is none }}|{{ unk_token }}|{{ pad_token }}|"
    "{{ messages | map(attribute='role') | join(',') }}|{{ tools is none }}|{{ extra | default('-') }}"
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <today> & 'tomorrow', für Köln",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": {"c": 1.5}}}],
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hello 🙂\nthere "}],
    [{"role": "system", "content": "Be brief & <b>kind</b>."}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": "12°"}, {"role": "tool", "content": "13"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "hm"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "n": (1, 2)}]}],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA2, DATED], ids=["chatml", "llama2", "dated"])
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    folder = save(tmp_path, byte_level(), {"chat_template.jinja": template})
    ours, theirs = Tokenizer.from_folder(folder), hf(folder)
    compared = 0
    for chat in CHATS:
        for tools in (None, TOOLS):
            for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False, "extra": "e"}):
                rest: dict[str, Any] = {"add_generation_prompt": True, "tools": tools, **options}
                try:
                    expected = theirs.apply_chat_template(chat, tokenize=False, **rest)
                except Exception:
                    with pytest.raises(ConfigError, match="chat template: "):
                        ours.render_chat(chat, **rest)
                    continue
                assert ours.render_chat(chat, **rest) == expected
                ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **rest)
                assert ours.encode_chat(chat, **rest) == ids
                compared += 1
    assert compared >= 18


def test_bos_is_not_added_twice(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), {"chat_template.jinja": "{{ bos_token }}{{ messages[0].content }}"})
    t = Tokenizer.from_folder(folder)
    assert t.encode_chat([{"role": "user", "content": "a"}]).count(0) == 1
    assert t.encode(t.render_chat([{"role": "user", "content": "a"}])).count(0) == 2  # what it guards against


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one", "one"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain", "tools"),
        ({"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "file"}, "file", "file"),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "more"}, "file", "more"),
    ],
)
def test_where_templates_come_from(tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str) -> None:
    folder = save(tmp_path, byte_level(), files)
    t, theirs = Tokenizer.from_folder(folder), hf(folder)
    chat = CHATS[0]
    assert t.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False) == plain
    assert t.render_chat(chat, TOOLS) == theirs.apply_chat_template(chat, TOOLS, tokenize=False) == with_tools


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template; send a plain prompt"),
        ([{"name": "rag", "template": "x"}], "no chat template named 'default', only rag"),
        ("a\n{% if %}", "chat template: line 2: "),
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template: .*str"),
        ("{{ messages[9].content.x }}", "chat template: .*has no element 9"),
        ("{{ messages.append(1) }}", "chat template: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
    ],
)
def test_chat_errors_say_what_is_wrong(tmp_path: Path, template: Any, message: str) -> None:
    t = Tokenizer.from_folder(save(tmp_path, byte_level(), {"tokenizer_config.json": {"chat_template": template}}))
    with pytest.raises(ConfigError, match=message):
        t.render_chat(CHATS[0])


def test_messages_that_are_no_messages(tmp_path: Path) -> None:
    t = Tokenizer.from_folder(save(tmp_path, byte_level(), {"chat_template.jinja": "x"}))
    with pytest.raises(ConfigError, match=r"messages is \[\]: give at least one message"):
        t.render_chat([])
    with pytest.raises(ConfigError, match="a PosixPath cannot be passed"):
        t.render_chat([{"role": "user", "content": Path()}])


@pytest.mark.parametrize("text", ["a\ud83d", "\ude00" * 5000])
def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path, text: str) -> None:
    t = Tokenizer.from_folder(save(tmp_path, byte_level(), {"chat_template.jinja": "{{ messages[0].content }}"}))
    for encode in (t.encode, lambda text: t.encode_pair("a", text)):
        with pytest.raises(ConfigError, match=r"^prompt has '\\ud...': half of a surrogate pair is no text"):
            encode(text)  # type: ignore[operator]
    call = {"function": {"name": "f", "arguments": {"a": [1, text]}}}
    for message, place in (
        ({"role": "user", "content": text}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": text}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": "", "tool_call_id": text}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "", "x": {text: 1}}, "messages[0].x"),
        ({"role": "assistant", "tool_calls": [call]}, "messages[0].tool_calls[0].function.arguments.a[1]"),
    ):
        with pytest.raises(ConfigError, match="^" + re.escape(place) + r" has '\\ud...': half of a surrogate pair"):
            t.render_chat([message])
    nested: Any = 1
    for _ in range(400):
        nested = [nested]
    with pytest.raises(ConfigError, match=r"^messages\[0\].x\[0\].*: nested deeper than 128 levels"):
        t.render_chat([{"role": "user", "content": "", "x": nested}])
    with pytest.raises(ConfigError, match=r"^mood has '.*': half"):
        t.render_chat([{"role": "user", "content": "a"}], mood=text)


def test_no_tokenizer_or_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer.json; make one with transformers"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json: damaged"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path, byte_level(), {"generation_config.json": "{"})
    with pytest.raises(ConfigError, match=r"generation_config.json: damaged"):
        Tokenizer.from_folder(tmp_path)


def test_the_embedded_model_chats_as_in_transformers() -> None:
    import graphllm

    folder = Path(graphllm.__file__).parent / "embedded" / "model"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("no embedded model")
    ours, theirs = Tokenizer.from_folder(folder), hf(folder)
    for chat in CHATS[:2]:
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat) == ids


def test_imports_stay_light(byte_folder: Path) -> None:
    code = f"""
import sys
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.text import Tokenizer
assert not {{"tokenizers", "jinja2"}} & set(sys.modules)
t = Tokenizer.from_folder({str(byte_folder)!r})
assert t.detokenizer().step(t.encode("Hello")) == "Hello"
assert not {{"torch", "numpy", "transformers", "jinja2"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
