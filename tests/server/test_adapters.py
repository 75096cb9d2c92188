"""Adapters over HTTP: each is a model of its own name, from the start or loaded while serving, in all processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
import transformers

from tests.artifacts import LIMITS, artifact_of, flags
from tests.server.live import Served
from tests.waiting import PATIENCE

PROMPTS = ["hello world", "the cat sat on", "what is the answer"]
SMALL: dict[str, Any] = {**LIMITS, "backend": "eager", "dtype": "float32"}
WITH_ADAPTERS = {**SMALL, "enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}


class Adapters:
    """Two adapters of the tiny Llama, and the texts that it gives with and without them."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
        self.folder, self._tokenizer = folder, transformers.AutoTokenizer.from_pretrained(checkpoint)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj", "down_proj"])
        self._model: Any = peft.get_peft_model(base, config, adapter_name="one").eval()
        self._model.add_adapter("two", config)
        for name, values in self._model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(values, std=0.3)
        self._model.save_pretrained(folder)

    def text(self, prompt: str, adapter: str | None, count: int = 8) -> str:
        """The greedy continuation."""
        ids = self._tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            if adapter is None:
                with self._model.disable_adapter():
                    out = self._model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
            else:
                self._model.set_adapter(adapter)
                out = self._model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        return str(self._tokenizer.decode(out[0][ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(checkpoint, tmp_path_factory.mktemp("adapters"))


def _package(site: Path, adapters: Path) -> str:
    """A package that finds adapters by names such as "found-one", as an entry of PYTHONPATH."""
    info = site / "finder-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: finder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[graphllm.lora_resolvers]\nfinder = finder:find\n")
    told = f"return {str(adapters)!r} + '/' + name[6:] if name.startswith('found-') else None"
    (site / "finder.py").write_text(f"def find(name):\n    {told}\n")
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def server(checkpoint: Path, adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    artifact_of(checkpoint, **WITH_ADAPTERS)
    served = Served(
        tmp_path_factory.mktemp("server") / "log", checkpoint, *flags(WITH_ADAPTERS),
        "--lora-modules", f"first={adapters.folder / 'one'}", "--lora-dir", adapters.folder,
        "--api-server-count", 2, "--served-model-name", "base",
        environment={
            "PYTHONPATH": _package(tmp_path_factory.mktemp("site"), adapters.folder),
        },
    )  # fmt: skip
    yield served.wait_ready()
    assert served.stop() == 0, served.log.read_text()


def _ask(server: Served, prompt: str, model: str) -> tuple[str, str]:
    """The model's name in the answer, and its text."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        found = client.completions.create(
            model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        return found.model, found.choices[0].text


def _route(server: Served, path: str, **fields: str) -> tuple[int, str]:
    """Status and text."""
    found = httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=fields, timeout=PATIENCE)
    return found.status_code, found.text


def test_adapters_are_models(server: Served, adapters: Adapters) -> None:
    """Several in requests at once, of which one has tables at a time; and chats."""
    models = json.loads(server.get("/v1/models")[1])["data"]
    assert [(m["id"], m["parent"]) for m in models] == [("base", None), ("first", "base")]
    loaded = _route(server, "load", lora_name="second", lora_path="two")
    assert loaded == (200, "Success: LoRA adapter 'second' added successfully.")
    known = {"base": None, "first": "one", "second": "two"}
    asked = [(prompt, model) for prompt in PROMPTS for model in known] * 2
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda a: _ask(server, *a), asked))
    assert found == [(model, adapters.text(prompt, known[model])) for prompt, model in asked]
    assert len(set(found)) >= 7
    (shown,) = (x for x in server.get("/metrics")[1].splitlines() if x.startswith("vllm:lora_requests_info{"))
    assert all(label in shown for label in ('max_lora="1"', 'running_lora_adapters=""', 'waiting_lora_adapters=""'))
    assert _route(server, "unload", lora_name="second")[0] == 200
    for _ in range(4):  # in whichever process
        status, body, _ = server.post("/v1/completions", {"model": "second", "prompt": "a"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_a_package_finds_adapters(server: Served, adapters: Adapters) -> None:
    """By names that nobody loaded; what it finds is a model from then on, unless it cannot be served."""
    assert _ask(server, PROMPTS[0], "found-two") == ("found-two", adapters.text(PROMPTS[0], "two"))
    status, body, _ = server.post("/v1/completions", {"model": "found-nothing", "prompt": "a"})
    assert (status, "No such file" in body["error"]["message"]) == (400, True)
    ids = [m["id"] for m in json.loads(server.get("/v1/models")[1])["data"]]
    assert "found-two" in ids
    assert "found-nothing" not in ids
    assert _route(server, "unload", lora_name="found-two")[0] == 200


def test_mistakes(server: Served, adapters: Adapters) -> None:
    outside = str(adapters.folder.parent)
    for path, body, status, told in (
        ("load", {"lora_name": "x", "lora_path": outside}, 400, "give a folder in the server's --lora-dir"),
        ("load", {"lora_name": "x", "lora_path": "one/../.."}, 400, "give a folder in the server's --lora-dir"),
        ("load", {"lora_name": "x", "lora_path": "nothing"}, 400, "No such file"),
        ("load", {"lora_name": "base", "lora_path": "one"}, 400, "the model itself has it"),
        ("load", {"lora_name": "first", "lora_path": "one"}, 400, "it is served already"),
        ("load", {"lora_name": "x"}, 400, "lora_path is missing"),
        ("unload", {"lora_name": "x"}, 404, "no adapter has it"),
    ):
        found, answer = _route(server, path, **body)
        assert (found, told in answer) == (status, True), answer


@pytest.mark.thorough
def test_a_server_does_not_start_with_an_adapter_that_it_cannot_serve(
    cli: Any, checkpoint: Path, adapters: Adapters, tmp_path: Path
) -> None:
    cases = (
        (("--lora-modules", f"a={tmp_path}"), "adapters are served with --enable-lora"),
        (("--enable-lora", "--lora-modules", "a"), "'a': give name=path, or JSON with name and path"),
        (("--enable-lora", "--lora-modules", f"a={tmp_path}"), "adapter_config.json is not there"),
        (("--enable-lora", "--max-lora-rank", 2, "--lora-modules", f"a={adapters.folder / 'one'}"), "has rank 4"),
        (("--enable-lora", "--lora-dir", tmp_path / "x"), "lora-dir is"),
    )
    for options, told in cases:
        done = cli("serve", checkpoint, *flags(SMALL), "--port", 0, *options)
        assert (done.code, told in done.err) == (2, True), done.err
