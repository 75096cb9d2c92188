"""One model type, measured: a tiny random checkpoint through transformers' generate and through the engine."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from bench.coverage.row import Result, Row
from bench.coverage.tiny import FIRST_TOKEN, PADDING, tiny
from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError
from graphllm.config.fields import MAX_MODEL_LEN
from graphllm.ir.registry import load_models, load_ops, load_passes
from graphllm.program.artifact import Artifact

BATCH, PROMPT, TAIL, DRAWN = (1, 7, 20), 90, 9, 8  # tokens
_STEP = 32  # tokens of a step, so that the batch is one, and the long prompt takes several
_MOST_NUMBERS = 20_000_000  # of a checkpoint that is still called tiny


def check(model_type: str) -> Row:
    """Make a tiny model of a type, and run it by every implementation that there is."""
    row = Row(model_type)
    torch.manual_seed(0)
    try:
        model = _tiny_model(model_type)
    except Exception as problem:  # of whatever kind transformers raises
        row.untried = _said(problem)
        return row
    row.architecture = type(model).__name__
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        prompts = _prompts(model.config.get_text_config().vocab_size)
        try:
            expected = [_generated(model, prompt) for prompt in prompts]
        except Exception as problem:
            row.untried = f"transformers: {_said(problem)}"
            return row
        compare = Comparison(model, prompts, expected, Path(folder))
        if row.architecture in load_models():
            row.ours = compare.run("graphllm")
        row.traced = compare.run("transformers")
    return row


def warm() -> None:
    """Import and trace once what every check needs, for processes that are forked from this one. It starts no
    thread."""
    pipeline = importlib.import_module("graphllm.compile.pipeline")
    importlib.import_module("graphllm.loading.artifact.compiling")
    load_ops(), load_models(), load_passes()
    model = _tiny_model("olmo2")
    _generated(model, [FIRST_TOKEN] * 3)
    fields = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    pipeline.find_model(fields).config({**fields, MAX_MODEL_LEN: 2})


class Comparison:
    """Prompts with the tokens that follow by transformers: a batch, and two long ones that begin alike.

    model: transformers'. folder: its checkpoint.
    """

    def __init__(self, model: Any, prompts: list[list[int]], expected: list[list[int]], folder: Path) -> None:
        self._model, self._prompts, self._expected, self._folder = model, prompts, expected, folder

    def run(self, model_impl: Literal["graphllm", "transformers"]) -> Result:
        """What the engine makes of them."""
        with _cache() as cache:
            try:
                engine = LLM(
                    self._folder, model_impl=model_impl, backend="eager", target="cpu", dtype="float32",
                    max_model_len=256, max_num_seqs=4, max_num_batched_tokens=_STEP, block_size=16,
                    skip_tokenizer_init=True,
                )  # fmt: skip
            except ConfigError as problem:
                return Result("refused", str(problem))
            except Exception as problem:
                return Result("fails", _said(problem))
            with engine:
                (place,) = (cache / "artifacts").glob("*/manifest.json")
                code = Artifact.trusted(place.parent).manifest.implementation
                try:
                    return Result(*self._compared(engine), code)
                except Exception as problem:
                    return Result("fails", _said(problem), code)

    def _compared(self, engine: LLM) -> tuple[Literal["works", "wrong"], str]:
        """Whether all tokens are transformers', and the first one that is not, in words."""
        sampling = SamplingParams(temperature=0.0, max_tokens=DRAWN, ignore_eos=True)
        count = len(BATCH)
        for name, which in (("batch", range(count)), ("chunks", [count]), ("prefix", [count + 1])):
            given = [{"prompt_token_ids": self._prompts[i]} for i in which]
            found = engine.generate(given, sampling, use_tqdm=False)
            for i, output in zip(which, found, strict=True):
                tokens = list(output.outputs[0].token_ids)
                if tokens[: (known := self._known(i))] != self._expected[i][:known]:
                    return "wrong", self._said(name, i, tokens)
        return "works", "" if output.num_cached_tokens else "nothing of the prefix was reused"

    def _known(self, i: int) -> int:
        """How many tokens are compared: those up to a drawn padding token, which some models give no position."""
        drawn = self._expected[i]
        return drawn.index(PADDING) + 1 if PADDING in drawn else len(drawn)

    def _said(self, name: str, i: int, tokens: list[int]) -> str:
        """Where tokens differ first, and by how much transformers' logits prefer its own token there."""
        prompt, expected = self._prompts[i], self._expected[i]
        at = next(n for n, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + expected[:at]]), use_cache=False).logits[0, -1]
        gap = float(logits[expected[at]] - logits[tokens[at]])
        return f"{name}: token {at} after {len(prompt)} is {tokens[at]}, not {expected[at]}, by {gap:.2g}"


def _tiny_model(model_type: str) -> Any:
    config: Any = transformers.CONFIG_MAPPING[model_type].from_dict(tiny(model_type))
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    if not isinstance(config, cls.config_class):
        config = config.get_text_config()
    config._attn_implementation = "eager"
    with torch.device("meta"):
        numbers = sum(p.numel() for p in cls(config).parameters())
    if numbers > _MOST_NUMBERS:
        raise ValueError(f"the smallest config here has {numbers:,} numbers")
    model = cls(config).eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            _draw(name, p)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b += 0.2 * torch.randn(b.shape)
    return model


def _draw(name: str, p: torch.Tensor) -> None:
    """Random numbers that no mix-up leaves unseen: constants move, matrices keep the size of what they read."""
    if p.dim() <= 1 or name.endswith("A_log") or not p.any() or bool((p == 1).all()):
        p += 0.2 * torch.randn(p.shape)
    else:
        p.normal_(0, 0.15)


def _prompts(vocabulary: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(FIRST_TOKEN, vocabulary, (n,), generator=draw).tolist() for n in (*BATCH, PROMPT, TAIL)]
    return [*found[:-1], found[-2] + found[-1]]


def _generated(model: Any, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens by transformers' generate, which ends at no token; by forward passes of the whole text where it
    cannot run, or has other tokens than these."""
    model.generation_config = transformers.GenerationConfig(pad_token_id=PADDING)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        with contextlib.suppress(AttributeError, IndexError, RuntimeError, ValueError):
            found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=DRAWN)
            best = model(found[:, :-1], use_cache=False).logits.argmax(-1)
            if torch.equal(best[:, len(prompt) - 1 :], found[:, len(prompt) :]):
                return list(found[0, len(prompt) :].tolist())
        for _ in range(DRAWN):
            token = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, token), -1)
    return list(ids[0, len(prompt) :].tolist())


@contextlib.contextmanager
def _cache() -> Iterator[Path]:
    """An empty cache of artifacts."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"GRAPHLLM_CACHE": folder}):
        yield Path(folder)


def _said(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}"
