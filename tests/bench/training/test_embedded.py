"""The embedded model: its folder, its chat template, its tasks and what it answers."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.training.data import END_OF_TEXT, TURN_END, TURN_START, answer_mask, render
from bench.training.evaluate import answers
from bench.training.tasks import TASKS, Sample, draw, in_split
from bench.training.tasks.base import exact, last_number, same_calls, same_json
from graphllm.embedded import HYBRID_DIR, MODEL_DIR, MOE_DIR

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_the_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= set(files)
    assert files["model.safetensors"] <= 16_000_000
    assert sum(files.values()) <= 17_000_000
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 1024
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 5_000_000 <= sum(tensor.numel() for tensor in tensors) <= 8_000_000


def right(folder: Path) -> float:
    """The mean over tasks that a model's card tells, in percent."""
    figures = dict(re.findall(r"\| (\w+) \| \d+ \| ([\d.]+)% \|", (folder / "README.md").read_text()))
    assert set(figures) == set(TASKS)
    return sum(map(float, figures.values())) / len(figures)


def test_the_card_tells_the_accuracy() -> None:
    assert "python -m bench.training.evaluate" in (MODEL_DIR / "README.md").read_text()
    assert right(MODEL_DIR) > 95


def test_the_small_one_with_experts() -> None:
    """At most 8 MB with all its files; the same tokenizer and template; it answers held-out questions as well."""
    sizes = {path.name: path.stat().st_size for path in MOE_DIR.iterdir()}
    assert sum(sizes.values()) <= 8_000_000
    config = json.loads((MOE_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
    assert right(MOE_DIR) > 95


def test_the_small_one_with_recurrent_layers() -> None:
    """At most 6 MB of weights; three of four layers are recurrent; nine tenths of the Llama's right answers."""
    assert (HYBRID_DIR / "model.safetensors").stat().st_size <= 6_000_000
    config = json.loads((HYBRID_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["layer_types"] == [*["linear_attention"] * 3, "full_attention"] * 2
    assert right(HYBRID_DIR) >= 0.9 * right(MODEL_DIR)


@pytest.mark.parametrize("folder", [MOE_DIR, HYBRID_DIR], ids=lambda folder: folder.name)
def test_the_same_tokenizer_and_template(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (MODEL_DIR / name).read_bytes()


def test_chat_template(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Paris?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", '
        '"description": "Get the current weather of a city.", "parameters": {"type": "object", '
        '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}\n</tools>\n'
        'To call one, answer with:\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>tool\n<tool_response>\n{"sky": "sunny"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nSunny.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    apply = tokenizer.apply_chat_template
    assert apply(messages, tools=[WEATHER], add_generation_prompt=True, tokenize=False) == expected
    call["function"]["arguments"] = '{"city": "Paris"}'  # as OpenAI clients send it
    assert apply(messages, tools=[WEATHER], add_generation_prompt=True, tokenize=False) == expected
    assert apply(messages[:1], tokenize=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_training_renders_as_transformers_does(tokenizer: Any) -> None:
    for name in TASKS:
        sample = draw(Random(name), name)
        expected = tokenizer.apply_chat_template(sample.conversation(), tools=sample.tools or None, tokenize=False)
        assert render(sample.conversation(), sample.tools) == expected


def test_the_tokenizer_gives_text_back(tokenizer: Any) -> None:
    text = "What is 12 + 7?\n  naïve 🚀 <tool_call>{}</tool_call>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("2026")["input_ids"]) == 4
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer(TURN_END)["input_ids"][0]


def test_loss_is_taken_on_what_the_model_says(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Goodbye!"},
    ]
    ids = torch.tensor([tokenizer(render(chat, []) + END_OF_TEXT + "Plain." + END_OF_TEXT)["input_ids"]])
    marks = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_START, TURN_END, "assistant"])
    said = ids[0][answer_mask(ids, *marks)[0]]
    assert tokenizer.decode(said) == f"Hello!{TURN_END}Goodbye!{TURN_END}Plain.{END_OF_TEXT}"


def test_checkers() -> None:
    assert exact("meow", " meow\n")
    assert not exact("meow", "meow meow")
    assert last_number("5 - 12 = -7.", "-7")
    assert not last_number("5 - 12 = -7.", "7")
    assert not last_number("5 - 12 = -7.", "I do not know.")
    assert same_json('{"a": 1, "b": 2}', '{"b":2,"a":1}')
    assert not same_json('{"a": 1}', '{"a": "1"}')
    assert not same_json('{"a": 1}', '{"a": 1')
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert same_calls(call, call.replace('"x": 1', '"x":1'))
    assert not same_calls(call, call.replace('"x": 1', '"x":2'))
    assert not same_calls(call, f"{call}\n{call}")
    assert not same_calls(call, f"Sure! {call}")


@pytest.mark.parametrize("name", TASKS)
def test_task(name: str) -> None:
    """Each task's answer is accepted, others are refused, and the two sides of the split do not meet."""
    rng = Random(name)
    train = [draw(rng, name) for _ in range(40)]
    held_out = [draw(rng, name, held_out=True) for _ in range(10)]
    for sample in (*train, *held_out):
        assert sample.accepts(sample.answer)
        assert not sample.accepts("")
        assert not sample.accepts("no")
    if name != "unknown":  # whose answer is always the same
        assert any(not train[0].accepts(other.answer) for other in train[1:])
    assert all(in_split(sample, held_out=False) for sample in train)
    assert not any(in_split(sample, held_out=False) for sample in held_out)


def test_a_held_out_sum_is_never_trained_on() -> None:
    rng = Random(0)
    trained = {sample.keys for sample in (draw(rng, "add") for _ in range(3000))}
    held_out = {sample.keys for sample in (draw(rng, "add", held_out=True) for _ in range(100))}
    assert not trained & held_out


QUESTIONS = {
    "What is 12 + 7?": "12 + 7 = 19.",
    "What is 83 - 38?": "83 - 38 = 45.",
    "How much is 7 times 8?": "7 * 8 = 56.",
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the chemical symbol for gold?": "The chemical symbol for gold is Au.",
    "Translate to German: green": "Green in German is grün.",
    "Sort these numbers: 41, 7, 99, 23": "7, 23, 41, 99",
    "Reverse the word house.": "esuoh",
    "Count from 5 to 12.": "5, 6, 7, 8, 9, 10, 11, 12",
    "Extract name and age as JSON: Clara is 31 years old and works as a pilot in Oslo.": '{"name": "Clara", "age": 31}',
    "Hello!": "Hello! How can I help you?",
    "Who are you?": (
        "I am the small model embedded in graphllm. I can calculate, answer simple questions and call tools."
    ),
}


def test_what_the_model_answers(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="auto").eval()
    chats = [Sample([{"role": "user", "content": question}], answer, ("",)) for question, answer in QUESTIONS.items()]
    weather = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    chats.append(
        Sample([{"role": "user", "content": "What is the weather in Rome?"}], weather, ("",), same_calls, [WEATHER])
    )
    turns = [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Nice to meet you, Anna!"},
        {"role": "user", "content": "What is my name?"},
    ]
    chats.append(Sample(turns, "Your name is Anna.", ("",)))
    said = answers(model, tokenizer, chats)
    assert [answer.text for answer in said] == [chat.answer for chat in chats]


def test_importing_the_path_imports_nothing_heavy() -> None:
    source = (Path(MODEL_DIR).parent / "__init__.py").read_text()
    assert re.findall(r"(?m)^(?:from|import) (\S+)", source) == ["pathlib"]
