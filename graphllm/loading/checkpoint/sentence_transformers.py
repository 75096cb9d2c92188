"""What sentence-transformers' files in a checkpoint folder say about how vectors are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from graphllm.config import ConfigError
from graphllm.config.fields import read, read_json, section, switch, whole
from graphllm.config.parameter import Check
from graphllm.config.pooling_config import POOLING, DenseActivation, DenseLayer, PoolingConfig, PoolingType

MODULES = "modules.json"
_IGNORED = ("Transformer", "Dropout")
_MODES: dict[str, PoolingType] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_FLAGS = {f"pooling_mode_{mode}{end}": mode for end in ("", "_token", "_tokens") for mode in _MODES}
_TEXT = Check(lambda v: isinstance(v, str), "set it to a text, or leave it out")


def read_pooling(folder: Path, config: Mapping[str, Any], pooling_type: str | None = None) -> PoolingConfig:
    """What a checkpoint folder and its config.json say of pooling. pooling_type: in place of theirs. Raises ConfigError
    for what is not supported, and for damaged files."""
    kind, dense, normalize, include_prompt = None, [], True, True
    modules = _modules(folder)
    if modules is None and (folder / "1_Pooling").is_dir():
        kind, include_prompt = _pooling(folder / "1_Pooling" / "config.json", pooling_type)
    elif modules is not None:
        kind, normalize = "ALL", False  # what follows may say otherwise
        for module in modules:
            name, path = module["type"].rpartition(".")[2], module.get("path") or ""
            if name == "Pooling":
                kind, include_prompt = _pooling(folder / path / "config.json", pooling_type)
            elif name == "Dense":
                dense.append(_dense(folder, path))
            elif name == "Normalize":
                normalize = True
            elif name not in _IGNORED:
                _refuse(f"{MODULES}: {name}", "a checkpoint with Transformer, Pooling, Dense and Normalize")
    told = read_json(folder / "config_sentence_transformers.json") or {}
    file = "config_sentence_transformers.json"
    prompts = {n: read(section(told, "prompts", file), n, _TEXT, "", "", file) for n in section(told, "prompts", file)}
    default = told.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: default_prompt_name is {default!r:.80}, which prompts has not; correct one of them")
    texts = next(filter(None, map(read_json, sorted(folder.glob("sentence_*_config.json")))), {})
    return PoolingConfig(
        pooling_type=pooling_type or kind,  # type: ignore[arg-type]
        dense=tuple(dense),
        normalize=normalize,
        dimensions=_dimensions(config),
        prompts=prompts,
        default_prompt_name=default,
        include_prompt=include_prompt,
        max_seq_length=whole(texts, "max_seq_length", 0, 0) or None,
        lowercase=switch(texts, "do_lower_case", False),
        similarity=str(told.get("similarity_fn_name") or "cosine"),
    )


def with_pooling(config: Mapping[str, Any], folder: Path, pooling_type: str | None = None) -> dict[str, Any]:
    """A config.json with the field "pooling", where something says how vectors are made: the checkpoint's files, for
    models that make some, or pooling_type in their place. Raises ConfigError for what is not supported."""
    if pooling_type is None and not (folder / MODULES).is_file() and not (folder / "1_Pooling").is_dir():
        return dict(config)
    told = read_pooling(folder, config, pooling_type).plain
    return {**config, POOLING: told}


def _modules(folder: Path) -> list[Mapping[str, Any]] | None:
    """The modules of modules.json, in order; None where there is no such file."""
    file = folder / MODULES
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as damage:
        raise ConfigError(f"{file}: damaged ({damage}); download it again") from damage
    right = isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in found)
    if not right or any(not _is_inner(m.get("path") or "") for m in found):
        raise ConfigError(f"{file}: damaged (no list of modules, each with a type and a path); download it again")
    return list(found)


def _is_inner(path: Any) -> bool:
    return isinstance(path, str) and not Path(path).is_absolute() and ".." not in Path(path).parts


def _pooling(file: Path, chosen: str | None) -> tuple[PoolingType, bool]:
    """Of 1_Pooling/config.json: the type, unless another one is chosen, and whether a prompt's tokens take part."""
    found = read_json(file)
    if found is None:
        raise ConfigError(f"{file}: is not there; download the whole checkpoint")
    include_prompt = switch(found, "include_prompt", True)
    if chosen is not None:
        return chosen, include_prompt  # type: ignore[return-value]
    modes = {n.removeprefix("pooling_mode_") for n, on in found.items() if n.startswith("pooling_mode_") and on is True}
    named = {_FLAGS.get(f"pooling_mode_{mode}", mode) for mode in modes}
    if isinstance(single := found.get("pooling_mode"), str):
        named.add(single)
    if len(named) != 1 or not named <= set(_MODES):
        _refuse(f"{file.parent.name}/config.json: {' and '.join(sorted(modes | named)) or 'no pooling_mode'}",
                f"a checkpoint with one of {', '.join(_MODES)}, or give --pooling-type")  # fmt: skip
    return _MODES[named.pop()], include_prompt


def _dense(folder: Path, path: str) -> DenseLayer:
    found = read_json(folder / path / "config.json")
    if found is None:
        raise ConfigError(f"{folder / path / 'config.json'}: is not there; download the whole checkpoint")
    activation = str(found.get("activation_function", "Tanh")).rpartition(".")[2].lower()
    if activation not in get_args(DenseActivation):
        _refuse(f"{path}/config.json: activation_function {activation}", ", ".join(get_args(DenseActivation)))
    if switch(found, "use_residual", False):
        _refuse(f"{path}/config.json: use_residual", "a checkpoint without it")
    sizes = whole(found, "in_features"), whole(found, "out_features")
    return DenseLayer(path, *sizes, switch(found, "bias", True), activation)  # type: ignore[arg-type]


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The lengths to which vectors may be cut, in order."""
    right = Check(
        lambda v: isinstance(v, list) and all(isinstance(n, int) and n > 0 for n in v), "give a list of whole numbers"
    )
    return tuple(sorted(read(config, "matryoshka_dimensions", right, (), ())))


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{what} is not supported; use {remedy}")


def check_last_token(folder: Path) -> None:
    """Raise ConfigError for a folder that asks for anything but the last token's vector as it is."""
    found = read_pooling(folder, {})
    if found.pooling_type not in (None, "LAST") or found.dense:
        raise ConfigError("1_Pooling/config.json: pooling of this family is by the last token, without dense layers")
