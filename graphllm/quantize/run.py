"""A checkpoint is quantized layer by layer: each is read, calibrated with what the quantized layers before it make,
rounded and written, and only then the next is read."""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from graphllm.config import ConfigError
from graphllm.quantize.awq import Fold, channel_scales, channels_of, fold, folds_of
from graphllm.quantize.gptq import gptq
from graphllm.quantize.layers import EXPERT, LayeredModel
from graphllm.quantize.output import Output
from graphllm.quantize.schemes import Scheme, grid_of, quantization_config, scheme_of, stored
from graphllm.quantize.text import read_text
from graphllm.weights.checkpoint.checkpoint import Checkpoint

METHODS = ("rtn", "gptq", "awq")
_ROWS = 4096  # of inputs that are multiplied together


@dataclass(frozen=True)
class Request:
    """What a user wants.

    ignore: names of modules that stay as they are, with * and ?, or regular expressions after "re:".
    samples, length: sequences of the calibration text and the most tokens of one.
    """

    output: Path
    scheme: str
    method: str = "rtn"
    calibration: Path | None = None
    ignore: tuple[str, ...] = ()
    group_size: int | None = None
    samples: int = 128
    length: int = 512
    device: str = "cpu"


class Fit(NamedTuple):
    """How well the models predict the held-out text.

    before, after: perplexity of the two models.
    same: share of tokens after which both find the same next token likeliest.
    """

    before: float
    after: float
    same: float
    tokens: int
    text: str


class Made(NamedTuple):
    """What was made.

    bits: of a weight of the matrices, with scales.
    nbytes: bytes of the new checkpoint's tensors.
    """

    matrices: int
    bits: float
    layers: int
    nbytes: int
    fit: Fit
    seconds: float


def quantize(folder: Path, checkpoint: Checkpoint, wanted: Request, tell: Callable[[str], None]) -> Made:
    """Write the quantized checkpoint. Raises ConfigError, and leaves no files, where it cannot be."""
    started = time.perf_counter()
    scheme = scheme_of(wanted.scheme, wanted.group_size)
    if wanted.method not in METHODS:
        raise ConfigError(f"method is {wanted.method!r:.80}: use {', '.join(METHODS)}")
    if wanted.method != "rtn" and wanted.calibration is None:
        raise ConfigError(f"method is {wanted.method}: it needs a text; give --calibration FILE, or use rtn")
    config = json.loads((folder / "config.json").read_text())
    if config.get("quantization_config") is not None:
        raise ConfigError("model: its config.json has a quantization_config; use a checkpoint in 16 or 32 bits")
    folds = folds_of(config.get("model_type")) if wanted.method == "awq" else ()
    with Output(wanted.output) as output:
        text = read_text(wanted.calibration, _tokenizer(folder), wanted.samples, wanted.length)
        model = LayeredModel(folder, checkpoint, torch.device(wanted.device))
        chosen = [_chosen(model, i, scheme, wanted) for i in range(len(model))]
        if not any(chosen):
            why = "ignore: give fewer patterns" if wanted.ignore else "model: use another one"
            raise ConfigError(f"{why}; no linear layer of {config.get('model_type')} layers is left to be quantized")
        calibration = [model.embedded(ids) for ids in text.calibration] if wanted.method != "rtn" else []
        before = [model.embedded(ids) for ids in text.held_out]
        after = list(before)
        output.add({n: model.read(n) for n in model.rest()})
        bits = 0
        for i, modules in enumerate(chosen):
            tell(f"layer {i + 1} of {len(model)}")
            tensors = {n: model.read(n) for n in model.names(i)}
            layer = model.layer(i, tensors)
            before = [model.run(i, layer, hidden) for hidden in before]
            seen = _inputs(model, i, layer, calibration) if wanted.method != "rtn" else {}
            made = _Layer(model, i, {n: t.to(model.device, torch.float32) for n, t in tensors.items()}, seen)
            for one in folds:
                made.fold(one, scheme, modules)
            parts = {m: made.rounded(m, scheme, wanted.method == "gptq") for m in modules}
            layer = model.layer(i, made.tensors)
            calibration = [model.run(i, layer, hidden) for hidden in calibration]
            after = [model.run(i, layer, hidden) for hidden in after]
            model.release(i)
            bits += 8 * sum(t.nbytes for of in parts.values() for n, t in of.items() if n != "weight_shape")
            kept = {
                n: made.tensors[n].to(t.dtype) for n, t in tensors.items() if n.removesuffix(".weight") not in parts
            }
            output.add(kept | {f"{m}.{n}": t for m, of in parts.items() for n, t in of.items()})
        fit = _fit(model, text.held_out, before, after, text.name)
        ignored = sorted({m for i, of in enumerate(chosen) for m in model.matrices(i) if m not in of})
        config["quantization_config"] = quantization_config(scheme, ["lm_head", *_routers(model), *ignored])
        total = output.finish(folder, config)
    weights = sum(checkpoint.tensors[f"{m}.weight"].shape[0] * checkpoint.tensors[f"{m}.weight"].shape[1]
                  for of in chosen for m in of)  # fmt: skip
    return Made(sum(map(len, chosen)), bits / weights, len(chosen), total, fit, time.perf_counter() - started)


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as failure:
        raise ConfigError(f"model: {folder} has no tokenizer that transformers reads ({failure!s:.200})") from failure


def _chosen(model: LayeredModel, i: int, scheme: Scheme, wanted: Request) -> list[str]:
    """The modules of a layer to be quantized. Raises ConfigError for what does not fit."""
    found = [m for m in model.matrices(i) if not any(_named(m, pattern) for pattern in wanted.ignore)]
    if wanted.method != "rtn" and (experts := [m for m in found if EXPERT.fullmatch(f"{m}.weight")]):
        raise ConfigError(
            f"method is {wanted.method}: {experts[0]} is an expert's, for which there is no calibration; use rtn, or "
            "--ignore '*.experts.*'"
        )
    for module in found:
        inner = model.checkpoint.tensors[f"{module}.weight"].shape[1]
        if scheme.group and inner % scheme.group:
            fitting = [n for n in (128, 64, 32, 16) if inner % n == 0]
            remedy = (
                f"give --group-size {fitting[0]}"
                if fitting and wanted.scheme.startswith("int")
                else f"--ignore '*.{module.rpartition('.')[2]}'"
            )
            raise ConfigError(
                f"group_size is {scheme.group}: it does not divide the {inner} inner entries of {module}; {remedy}"
            )
    return found


def _named(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def _routers(model: LayeredModel) -> list[str]:
    """Names of routers. Readers of the new checkpoint that have a linear layer there must not expect it rounded."""
    has_experts = any(EXPERT.fullmatch(n) for n in model.checkpoint.tensors)
    return [r"re:.*\.(gate|router|shared_expert_gate)$"] if has_experts else []


class Seen:
    """What a layer was given: the sum of outer products of its inputs, and their mean magnitude."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._rows: list[Tensor] = []
        self.count = 0
        self.gram: Tensor = torch.zeros(())
        self.size: Tensor = torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Count inputs once, whoever else reads them."""
        if x is self.last:
            return
        self.last = x
        self._rows.append(x.reshape(-1, x.shape[-1]))
        if sum(map(len, self._rows)) >= _ROWS:
            self.finish()

    def finish(self) -> None:
        """Take what was given so far into the sums."""
        if self._rows:
            rows = torch.cat(self._rows)
            self._rows.clear()
            self.count += len(rows)
            self.gram = self.gram + rows.T @ rows
            self.size = self.size + rows.abs().sum(0)


def _inputs(model: LayeredModel, i: int, layer: nn.Module, calibration: Sequence[Tensor]) -> dict[str, Seen]:
    """By the full name of each linear layer; those that read the same share one."""
    seen: dict[str, Seen] = {}
    latest: list[Seen] = []

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            if name not in seen:
                shared = [s for s in latest if s.last is given[0]]
                seen[name] = shared[0] if shared else Seen()
                latest.append(seen[name])
            seen[name].add(given[0])

        return hook

    hooks = [
        module.register_forward_pre_hook(hook_of(f"{model.prefix}.{i}.{name}"))
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        for hidden in calibration:
            model.run(i, layer, hidden)
    finally:
        for handle in hooks:
            handle.remove()
    for one in seen.values():
        one.finish()
    return seen


class _Layer:
    """A layer's tensors in float32, by their names in the checkpoint, on their way to what is stored."""

    def __init__(self, model: LayeredModel, i: int, tensors: dict[str, Tensor], seen: Mapping[str, Seen]) -> None:
        self.start, self.tensors, self._seen = f"{model.prefix}.{i}.", tensors, dict(seen)
        self._dtype = model.dtype
        text = model.config.get_text_config()
        self._head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

    def fold(self, one: Fold, scheme: Scheme, modules: Sequence[str]) -> None:
        """Scale the readers of one fold; some of them are to be rounded."""
        named = Fold(self.start + one.maker, tuple(self.start + r for r in one.readers))
        rounded = [r for r in named.readers if r in modules]
        if not rounded:
            return
        seen, inner = self._seen[rounded[0]], self.tensors[f"{rounded[0]}.weight"].shape[1]
        channels = channels_of(len(self.tensors[f"{named.maker}.weight"]), inner, self._head).to(seen.gram.device)
        size = seen.size / seen.count
        weights = [self.tensors[f"{r}.weight"] for r in rounded]
        scales = channel_scales(weights, seen.gram, size, scheme, self._dtype, channels)
        self.tensors |= fold(self.tensors, named, scales, channels, self._dtype)

    def rounded(self, module: str, scheme: Scheme, by_gptq: bool) -> dict[str, Tensor]:
        """What is stored of a module's matrix, which becomes what that stands for."""
        name = f"{module}.weight"
        weight = self.tensors[name]
        if by_gptq:
            gram = self._seen[module].gram
            grid = grid_of(weight, scheme, self._dtype, gram.diagonal())
            levels, numbers = gptq(weight, gram, grid)
        else:
            grid = grid_of(weight, scheme, self._dtype)
            levels, numbers = grid.rounded(weight)
        self.tensors[name] = numbers
        return stored(grid, levels, self._dtype)


def _fit(
    model: LayeredModel, ids: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor], text: str
) -> Fit:
    losses, same, count = [0.0, 0.0], 0, 0
    for sequence, *hidden in zip(ids, before, after, strict=True):
        wanted, likeliest = sequence[1:].to(model.device), []
        for k, each in enumerate(hidden):
            logits = model.logits(sequence, each)[:-1]
            losses[k] += float(nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            likeliest.append(logits.argmax(-1))
        same += int((likeliest[0] == likeliest[1]).sum())
        count += len(wanted)
    perplexity = [float(torch.tensor(loss / count).exp()) for loss in losses]
    return Fit(perplexity[0], perplexity[1], same / count, count, text)
