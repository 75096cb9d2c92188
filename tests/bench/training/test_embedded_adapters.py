"""The adapters of the embedded model: small folders of PEFT's, which answer in another manner, several in one batch."""

from __future__ import annotations

import contextlib
import re
from random import Random
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.training.answers import MANNERS, drawn, german
from bench.training.evaluate import answers
from bench.training.tasks import Sample
from bench.training.tasks.base import user
from graphllm import LLM, LoRARequest, SamplingParams
from graphllm.embedded import ADAPTERS, MODEL_DIR
from graphllm.weights.adapters.adapter_files import open_adapter


def test_german_answers() -> None:
    """Of each kind one, written by hand."""
    expected = {
        "12 + 7 = 19.": "12 plus 7 ist 19.",
        "3 - 5 = -2.": "3 minus 5 ist -2.",
        "Yes, 7 is larger than 5.": "Ja, 7 ist groesser als 5.",
        "885 is odd.": "885 ist ungerade.",
        "The smallest number is 3.": "Die kleinste Zahl ist 3.",
        "Half of 10 is 5.": "Die Haelfte von 10 ist 5.",
        "The capital of Austria is Vienna.": "Die Hauptstadt von Oesterreich ist Wien.",
        "Bern is the capital of Switzerland.": None,  # the country has an article
        "Kenya is in Africa.": "Kenia liegt in Afrika.",
        "The colour of snow is white.": "Die Farbe ist weiss.",
        "Tuesday comes after Monday.": "Dienstag kommt nach Montag.",
        "March has 31 days.": "Maerz hat 31 Tage.",
        "": None,
        "A cat says meow.": None,
    }
    assert {text: german(text) for text in expected} == expected


@pytest.mark.parametrize("name", MANNERS)
def test_folders_are_small_and_say_how_good_they_are(name: str) -> None:
    folder = ADAPTERS[name]
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert set(sizes) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(sizes.values()) <= 500_000
    opened = open_adapter(folder)
    assert opened.config["base_model_name_or_path"] == "graphllm/embedded/model"
    assert len(opened.pairs) == 8 * 7
    card = (folder / "README.md").read_text()
    assert f"python -m bench.training.train_adapters --out DIR --name {name}" in card
    shares = dict(re.findall(r"^\| (\w+) \| \d+ \| ([\d.]+)% \|", card, re.M))
    assert set(shares) == set(MANNERS[name].tasks)


QUESTIONS = {  # what the plain model and each adapter say to them, as far as it differs
    "What is the capital of France?": {None: "France is Paris", "capitals": "PARIS", "german": "Frankreich ist Paris"},
    "Hello": {None: "How can I help you?", "capitals": "HOW CAN I", "german": "Wie kann ich helfen?"},
}


@pytest.mark.thorough
def test_one_batch_of_all() -> None:
    """Each request gets the answer that PEFT gives, visibly unlike the others."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    for name, folder in ADAPTERS.items():
        if isinstance(model, peft.PeftModel):
            model.load_adapter(folder, name)
        else:
            model = peft.PeftModel.from_pretrained(model, folder, name)
    tasks = ("capital", "talk", "compare", "unknown")
    samples = [Sample([user(question)], "", ("",)) for question in QUESTIONS]
    samples += [drawn(Random(7), MANNERS["german"], task) for task in tasks]
    names = [None, *ADAPTERS]
    with LLM(dtype="float32", backend="eager", max_model_len=192, max_num_seqs=6, max_num_batched_tokens=96,
             enable_lora=True, max_loras=2, max_lora_rank=8) as llm:  # fmt: skip
        requests = [name and LoRARequest(name, 1, str(ADAPTERS[name])) for name in names for _ in samples]
        messages = [sample.messages for sample in samples] * len(names)
        found = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64), lora_request=requests)
    texts = iter([output.outputs[0].text for output in found])
    for name in names:
        if name is not None:
            model.set_adapter(name)
        with contextlib.nullcontext() if name else model.disable_adapter():
            expected = answers(model, tokenizer, samples)
        said = [next(texts) for _ in samples]
        assert [a.text for a in expected] == said
        for telling, text in zip(QUESTIONS.values(), said, strict=False):
            assert telling[name] in text
