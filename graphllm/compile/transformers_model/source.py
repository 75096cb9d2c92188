"""Source: a config.json as an instance of transformers' own class, on meta, with its decoder layers.

Only classes of the library are made; code that a repository brings never runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from graphllm.compile.transformers_model import leaves
from graphllm.compile.transformers_model.refusal import refused, where_of
from graphllm.config import ConfigError
from graphllm.config.fields import MAX_MODEL_LEN, READ, strings


class Source(NamedTuple):
    """A model to trace.

    model: a causal language model of transformers. Its parameters are on meta, its computed buffers have their values.
    layers: its decoder layers, in order. path: the name of the list that holds them, such as "model.layers".
    longest: the longest context that is compiled for, in tokens.
    rounded: the computed buffers that are of the model's dtype, by their `id`; here they are float32.
    """

    model: nn.Module
    layers: nn.ModuleList
    path: str
    longest: int
    rounded: frozenset[int]

    @property
    def config(self) -> Any:
        """transformers' config of the model."""
        return self.model.config


def model_class(hf: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' classes of a config.json: of its config and of its causal language model. Raises ConfigError where
    there is none, or where the file means another one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, names = hf.get("model_type"), strings(hf, "architectures")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ConfigError(f"config.json: model_type is {kind!r:.80}, which transformers does not know")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"config.json: transformers has no causal language model of model_type {kind!r:.80}")
    config_class = CONFIG_MAPPING[kind]
    found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    classes = found if isinstance(found, tuple) else (found,)
    named = [c for c in classes if c.__name__ in names]
    if not named:
        there = " or ".join(c.__name__ for c in classes)
        raise ConfigError(f"config.json: architectures is {list(names)}; transformers' model that generates is {there}")
    return config_class, named[0]


def open_source(hf: Mapping[str, Any]) -> Source:
    """The model of a config.json. Raises ConfigError for a file that transformers refuses, and for a model whose layers
    are not one list."""
    config_class, cls = model_class(hf)
    fields = {n: v for n, v in hf.items() if n not in (READ, MAX_MODEL_LEN, "quantization_config", "draft")}
    with _reported(hf, f"transformers' {config_class.__name__}"):
        config = config_class.from_dict(fields)
    if getattr(config, "is_encoder_decoder", False):
        raise refused(cls.__name__, "an encoder and a decoder, of which only decoders alone are traced")
    leaves.register()
    config._attn_implementation = leaves.NAME
    config._experts_implementation = "batched_mm"
    with _reported(hf, f"transformers' {cls.__name__}"), torch.device("meta"):
        model = cls._from_config(config, dtype=torch.bfloat16).eval()
    longest = hf.get(MAX_MODEL_LEN) or getattr(config, "max_position_embeddings", None) or 2048
    _keep_float32(model)
    rounded = _compute_buffers(model)
    path, layers = _decoder_layers(model)
    return Source(model, layers, path, longest, frozenset(rounded))


@contextlib.contextmanager
def _reported(hf: Mapping[str, Any], what: str) -> Iterator[None]:
    """Whatever transformers raises becomes a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except KeyError as problem:
        if problem.args != (leaves.NAME,):
            raise
        raise refused(what.split()[-1], "attention of its own, not by transformers' interface", problem) from problem
    except Exception as problem:  # it raises of every kind
        raise ConfigError(
            f"config.json (model_type {hf.get('model_type')!r:.80}): {what} refuses it: {type(problem).__name__}: "
            f"{str(problem)[:300]}{where_of(problem)}"
        ) from problem


def _keep_float32(model: nn.Module) -> None:
    """Parameters that transformers loads in float32 whatever the model's dtype."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in model.named_parameters():
        if any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.float()


def _compute_buffers(model: nn.Module) -> list[int]:
    """Give buffers that no checkpoint has their values, as transformers does after it has loaded one; see
    `Source.rounded`."""
    rounded = []
    owners: list[Any] = [m for m in model.modules() if hasattr(m, "_init_weights")]
    for name, module in model.named_modules():
        own = {n for n, b in module._buffers.items() if b is not None and n in module._non_persistent_buffers_set}
        if not own:
            continue
        for n in own:
            buffer = module._buffers[n]
            assert buffer is not None
            of_model = buffer.dtype == torch.bfloat16
            real = torch.zeros_like(buffer, device="cpu", dtype=torch.float32 if of_model else buffer.dtype)
            rounded += [id(real)] if of_model else []
            module._buffers[n] = real
        owner = [m for m in owners if any(m is o for o in _parents(model, name))][-1]
        with torch.no_grad():
            owner._init_weights(module)
    return rounded


def _parents(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules around the one of a name, from the model down to it."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]


def _decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of as many modules as the config has layers, the outermost one; its name."""
    config: Any = model.config
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise refused(type(model).__name__, f"no list of its {count} layers")
    return min(found, key=lambda pair: pair[0].count("."))
