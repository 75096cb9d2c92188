"""`SentenceFiles`: what sentence-transformers' files in a checkpoint folder say about how vectors are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from graphllm.config import ConfigError
from graphllm.config.fields import Fields, read, read_json, section, switch, whole
from graphllm.config.parameter import Check
from graphllm.config.pooling_config import DenseActivation, DenseLayer, PoolingConfig, PoolingType

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_ALONE = "1_Pooling"  # the folder of older checkpoints, which have no modules.json
_IGNORED = ("Transformer", "Dropout")
_MODES: dict[str, PoolingType] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_FLAGS = {f"pooling_mode_{mode}{end}": mode for end in ("", "_token", "_tokens") for mode in _MODES}
_TEXT = Check(lambda v: isinstance(v, str), "set it to a text, or leave it out")


class Module(NamedTuple):
    """One module of modules.json.

    kind: the name of its class, such as Pooling.
    path: its folder, relative to the checkpoint's; "" for the checkpoint's own.
    """

    kind: str
    path: str


@dataclass(frozen=True)
class SentenceFiles:
    """The files of sentence-transformers in a checkpoint folder.

    folder: the checkpoint's.
    modules: what modules.json lists, in order; None where there is no such file. An older checkpoint with the folder
        1_Pooling has that one module.
    listed: whether there is a modules.json.
    configs: the config.json of each module's folder, by that folder.
    settings: config_sentence_transformers.json, empty where there is none.
    texts: the files sentence_*_config.json, by name.
    """

    folder: Path
    modules: tuple[Module, ...] | None
    listed: bool
    configs: Mapping[str, Fields]
    settings: Fields
    texts: Mapping[str, Fields]

    @staticmethod
    def read(folder: Path) -> SentenceFiles:
        """Read a folder. Raises ConfigError naming the file that is damaged."""
        listed = _modules(folder / MODULES)
        modules = listed
        if listed is None and (folder / _ALONE).is_dir():
            modules = (Module("Pooling", _ALONE),)
        paths = {module.path for module in modules or () if module.kind in ("Pooling", "Dense")}
        paths |= {file.parent.name for file in folder.glob("*_Pooling/config.json")}
        found = {path: read_json(folder / path / "config.json") for path in sorted(paths)}
        return SentenceFiles(
            folder,
            modules,
            listed is not None,
            {path: config for path, config in found.items() if config is not None},
            read_json(folder / SETTINGS) or {},
            {file.name: read_json(file) or {} for file in sorted(folder.glob("sentence_*_config.json"))},
        )

    @cached_property
    def dense(self) -> tuple[DenseLayer, ...]:
        """The dense layers that follow pooling, in order. Raises ConfigError for one that is not supported."""
        return tuple(self._dense(module.path) for module in self.modules or () if module.kind == "Dense")

    def pooling(self, config: Fields, pooling_type: str | None = None) -> PoolingConfig:
        """What they say of pooling. config: the checkpoint's config.json. pooling_type: in place of what the files say.
        Raises ConfigError for what is not supported."""
        kind, include_prompt = ("ALL" if self.listed else None), True
        normalize = not self.listed  # a modules.json says it by a module
        for module in self.modules or ():
            if module.kind == "Pooling":
                kind, include_prompt = self._pooling(module.path, pooling_type)
            elif module.kind == "Normalize":
                normalize = True
            elif module.kind not in ("Dense", *_IGNORED):
                _refuse(f"{MODULES}: {module.kind}", "a checkpoint with Transformer, Pooling, Dense and Normalize")
        prompts = section(self.settings, "prompts", SETTINGS)
        prompts = {name: read(prompts, name, _TEXT, "", "", SETTINGS) for name in prompts}
        default = self.settings.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise ConfigError(
                f"{SETTINGS}: default_prompt_name is {default!r:.80}, which prompts has not; correct one of them"
            )
        texts = next(filter(None, self.texts.values()), {})
        return PoolingConfig(
            pooling_type=pooling_type or kind,  # type: ignore[arg-type]
            dense=self.dense,
            normalize=normalize,
            dimensions=_dimensions(config),
            prompts=prompts,
            default_prompt_name=default,
            include_prompt=include_prompt,
            max_seq_length=whole(texts, "max_seq_length", 0, 0) or None,
            lowercase=switch(texts, "do_lower_case", False),
            similarity=str(self.settings.get("similarity_fn_name") or "cosine"),
        )

    def _pooling(self, path: str, chosen: str | None) -> tuple[PoolingType, bool]:
        """The type of a Pooling module, unless another one is chosen, and whether a prompt's tokens take part."""
        found = self._config(path)
        include_prompt = switch(found, "include_prompt", True)
        if chosen is not None:
            return chosen, include_prompt  # type: ignore[return-value]
        start = "pooling_mode_"
        modes = {name.removeprefix(start) for name, on in found.items() if name.startswith(start) and on is True}
        named = {_FLAGS.get(f"{start}{mode}", mode) for mode in modes}
        if isinstance(single := found.get("pooling_mode"), str):
            named.add(single)
        if len(named) != 1 or not named <= set(_MODES):
            _refuse(f"{Path(path).name}/config.json: {' and '.join(sorted(modes | named)) or 'no pooling_mode'}",
                    f"a checkpoint with one of {', '.join(_MODES)}, or give --pooling-type")  # fmt: skip
        return _MODES[named.pop()], include_prompt

    def _dense(self, path: str) -> DenseLayer:
        found = self._config(path)
        activation = str(found.get("activation_function", "Tanh")).rpartition(".")[2].lower()
        if activation not in get_args(DenseActivation):
            _refuse(f"{path}/config.json: activation_function {activation}", ", ".join(get_args(DenseActivation)))
        if switch(found, "use_residual", False):
            _refuse(f"{path}/config.json: use_residual", "a checkpoint without it")
        sizes = whole(found, "in_features"), whole(found, "out_features")
        return DenseLayer(path, *sizes, switch(found, "bias", True), activation)  # type: ignore[arg-type]

    def _config(self, path: str) -> Fields:
        if path not in self.configs:
            raise ConfigError(f"{self.folder / path / 'config.json'}: is not there; download the whole checkpoint")
        return self.configs[path]


def _modules(file: Path) -> tuple[Module, ...] | None:
    """What a modules.json lists; None where there is no such file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as damage:
        raise ConfigError(f"{file}: damaged ({damage}); download it again") from damage
    right = isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in found)
    if not right or any(not _is_inner(m.get("path") or "") for m in found):
        raise ConfigError(f"{file}: damaged (no list of modules, each with a type and a path); download it again")
    return tuple(Module(m["type"].rpartition(".")[2], m.get("path") or "") for m in found)


def _is_inner(path: Any) -> bool:
    return isinstance(path, str) and not Path(path).is_absolute() and ".." not in Path(path).parts


def _dimensions(config: Fields) -> tuple[int, ...]:
    """The lengths to which vectors may be cut, in order."""
    right = Check(
        lambda v: isinstance(v, list) and all(isinstance(n, int) and n > 0 for n in v), "give a list of whole numbers"
    )
    return tuple(sorted(read(config, "matryoshka_dimensions", right, (), ())))


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{what} is not supported; use {remedy}")
