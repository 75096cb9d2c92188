"""transformers' model of a checkpoint, with one layer at a time in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM

from graphllm.config import ConfigError
from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
"""A matrix of an expert: transformers' layers hold the matrices of all experts stacked."""


class _Place(nn.Module):
    """Takes the place of a layer: keeps its input and returns it, or returns `result`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Any = None
        self.arguments: dict[str, Any] = {}
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """As a layer's."""
        self.hidden, self.arguments = hidden, arguments
        return hidden if self.result is None else self.result.to(hidden.dtype)


class LayeredModel:
    """A causal language model; the caller runs its layers. Computes in float32 within layers, in the checkpoint's dtype
    before and after them."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self._files: dict[Path, Any] = {}
        self.config = AutoConfig.from_pretrained(folder)
        with _without_memory():
            model = AutoModelForCausalLM.from_config(self.config)
        self.dtype: torch.dtype = model.dtype
        lists = {
            name: found
            for name, found in model.named_modules()
            if isinstance(found, nn.ModuleList) and len(found) == self.config.get_text_config().num_hidden_layers
        }
        if not lists:
            raise ConfigError(f"model: no layers were found in {type(model).__name__}; use a decoder model")
        self.prefix, layers = next(iter(lists.items()))
        self._layers: list[nn.Module] = list(layers)
        self._places = [_Place() for _ in layers]
        for i, place in enumerate(self._places):
            layers[i] = place
        wanted = {n for n, p in model.named_parameters() if p.is_meta}
        model.load_state_dict(
            {n: self.read(n) for n in sorted(wanted & {*checkpoint.tensors})}, strict=False, assign=True
        )
        model.tie_weights()
        if lost := [n for n, p in model.named_parameters() if p.is_meta]:
            raise WeightError(checkpoint.folder, [f"{n}: missing, {type(model).__name__} needs it" for n in lost])
        self._model = model.to(device).eval()
        self._given: dict[int, list[dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def read(self, name: str) -> Tensor:
        """A tensor as the checkpoint has it."""
        file = self.checkpoint.tensors[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, "pt")
        found: Tensor = self._files[file].get_tensor(name)
        return found

    def names(self, i: int) -> list[str]:
        """The checkpoint's tensors of a layer."""
        start = f"{self.prefix}.{i}."
        return sorted(n for n in self.checkpoint.tensors if n.startswith(start))

    def rest(self) -> list[str]:
        """Tensors of no layer."""
        return sorted({*self.checkpoint.tensors}.difference(*map(self.names, range(len(self)))))

    def matrices(self, i: int) -> list[str]:
        """The modules, by their full names, of a layer's matrices that can be quantized."""
        linear = {
            f"{self.prefix}.{i}.{name}"
            for name, module in self._layers[i].named_modules()
            if isinstance(module, nn.Linear) and f"{self.prefix}.{i}.{name}.weight" in self.checkpoint.tensors
        }
        return sorted(linear | {n.removesuffix(".weight") for n in self.names(i) if EXPERT.fullmatch(n)})

    def layer(self, i: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A layer with these numbers, by their names in the checkpoint."""
        start = f"{self.prefix}.{i}."
        state = {n.removeprefix(start): t.to(self.device, torch.float32) for n, t in _stacked(tensors).items()}
        layer = self._layers[i]
        wanted = {n for n, _ in layer.named_parameters()}
        if lost := wanted - {*state}:
            raise WeightError(
                self.checkpoint.folder,
                [f"{start}{n}: there is no tensor of this name; the model's layers are stored in another way than "
                 "transformers has them, which cannot be quantized" for n in sorted(lost)],
            )  # fmt: skip
        layer.load_state_dict({n: state[n] for n in wanted}, assign=True, strict=False)
        return layer.eval()

    def release(self, i: int) -> None:
        """Forget a layer."""
        self._layers[i] = nn.Identity()

    @torch.inference_mode()
    def embedded(self, ids: Tensor) -> Tensor:
        """What the first layer is given, [1, T, D] float32."""
        self._model.base_model(ids.unsqueeze(0).to(self.device), use_cache=False)
        # What else layers are given depends on the number of tokens only.
        self._given[len(ids)] = [place.arguments for place in self._places]
        hidden: Tensor = self._places[0].hidden
        return hidden.float()

    @torch.inference_mode()
    def run(self, i: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """What a layer makes of what it is given."""
        given = {n: _float(v) for n, v in self._given[hidden.shape[1]][i].items()}
        made = layer(hidden, **given)
        return made[0] if isinstance(made, tuple) else made

    @torch.inference_mode()
    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """[T, V] float32, where the last layer made ``hidden``."""
        self._places[-1].result = hidden
        made = self._model(ids.unsqueeze(0).to(self.device), use_cache=False).logits[0].float()
        self._places[-1].result = None
        return made


def _float(value: Any) -> Any:
    """Floating tensors, also in tuples, as float32."""
    if isinstance(value, tuple):
        return tuple(map(_float, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the matrices of experts as transformers has them: [N, 2F, D], or [N, F, D] without gates, and [N, D, F]."""
    made = {n: t for n, t in tensors.items() if not EXPERT.fullmatch(n)}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor
    for prefix, of in experts.items():
        each = [of[n] for n in range(len(of))]
        first = [name for name in ("gate_proj", "up_proj") if name in each[0]]
        stack = "gate_up_proj" if len(first) > 1 else first[0]
        made[f"{prefix}.{stack}"] = torch.stack([torch.cat([e[name] for name in first]) for e in each])
        made[f"{prefix}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return made


@contextmanager
def _without_memory() -> Iterator[None]:
    """Modules that are made within have parameters without memory. Their buffers, which are computed, have it."""

    def without(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(cast(Any, without))  # torch's type leaves out what it returns
    try:
        yield
    finally:
        hook.remove()
