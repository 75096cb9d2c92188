"""A model as a user names it, opened and checked as far as its headers say."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.fields import is_folder, read_json
from graphllm.config.pooling_config import dense_tensor
from graphllm.loading.checkpoint.conversion import safetensors_of, tokenizer_folder
from graphllm.loading.checkpoint.hub import Hub, Wanted
from graphllm.loading.checkpoint.quantization_files import with_quantization
from graphllm.loading.checkpoint.runner import with_runner
from graphllm.loading.checkpoint.sentence_transformers import MODULES, read_pooling, with_pooling
from graphllm.weights.checkpoint.checkpoint import (
    DRAFT,
    Checkpoint,
    TensorInfo,
    WeightError,
    draft_name,
    fingerprint,
    pick_weights,
    weight_files,
)
from graphllm.weights.checkpoint.multimodal import is_multimodal, text_config, text_tensors
from graphllm.weights.checkpoint.own_head import HEAD, has_own_head

_log = logging.getLogger(__name__)

_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configs, tokenizer, chat template
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
_DENSE = "[0-9]*_Dense/"  # of sentence-transformers: what lies behind pooling
_FURTHER = "mtp_layers."  # in the names of tensors that only draft
_ENDINGS = ("ForCausalLM", "LMHeadModel")  # of architectures that generate text


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, opened: its config.json and the headers of its tensors. absent: why there are none, where
    they were asked for. name: what people call it. commit: of the hub's repository, None for a folder of one's own.
    draft: the folder of the draft model that joins it."""

    folder: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    absent: WeightError | None = None
    name: str = ""
    commit: str | None = None
    draft: Path | None = None

    @property
    def tensors(self) -> str:
        """Digest of the tensor names, shapes and dtypes. Raises WeightError when there are none."""
        if self.absent is not None:
            raise self.absent
        return fingerprint(self.checkpoint) if self.checkpoint else "random weights"


def find_source(args: EngineArgs) -> Source:
    """The model of these settings: a folder, or a name of the Hugging Face hub that is looked up in its cache and
    downloaded when it is not there. Raises ConfigError naming what is missing or unreadable."""
    hub = Hub.of(args.download_dir, args.hf_token)
    wanted = model_files(args.load_format)
    model = None if args.model is None else hub.find("model", args.model, args.revision, wanted)
    draft = _draft_folder(args, hub, model.folder if model else None)
    config = None
    if args.hf_config_path is not None:
        config = hub.find("hf_config_path", args.hf_config_path, None, _CONFIG).folder
    source = open_source(
        model.folder if model else None, args.load_format, draft, config, args.hf_overrides, args.speculative_method,
        args.pooling_type, args.runner, args.convert,
    )  # fmt: skip
    return replace(source, name=model.name, commit=model.commit) if model else source


def _draft_folder(args: EngineArgs, hub: Hub, model: Path | None) -> Path | None:
    """The folder of what drafts: what is named, the model's own for layers of its checkpoint, or one that comes with
    the embedded model. Raises ConfigError when there is none."""
    method, named = args.speculative_method, args.speculative_model
    if named is not None:
        wanted = model_files(args.load_format) if method in (None, "draft_model") else _HEAD
        return hub.find("speculative_model", named, None, wanted).folder
    if method is None:
        return None
    from graphllm.embedded import DRAFTS, MODEL_DIR

    if method == "mtp":
        return model or MODEL_DIR
    if model is not None and model.resolve() != MODEL_DIR:
        raise ConfigError(
            f"speculative_method is {method}: what drafts is a checkpoint of its own; give its folder or hub name as "
            "speculative_model, in a speculative_config as model"
        )
    if method not in DRAFTS:
        raise ConfigError(
            f"speculative_method is {method}: with the embedded model come {', '.join(DRAFTS)}; use one of them, or "
            "give speculative_model"
        )
    return DRAFTS[method]


def find_tokenizer(args: EngineArgs, source: Source) -> Path:
    """The folder with the tokenizer.json of these settings. Raises ConfigError when there can be none."""
    if args.tokenizer is None:
        if args.tokenizer_revision not in (None, args.revision, "main"):
            raise ConfigError(
                f"tokenizer_revision is {args.tokenizer_revision!r:.80}: it is of --tokenizer; give that, too, or use "
                "--revision for all of the model"
            )
        return tokenizer_folder(source.folder)
    hub = Hub.of(args.download_dir, args.hf_token)
    return tokenizer_folder(hub.find("tokenizer", args.tokenizer, args.tokenizer_revision, _TOKENIZER).folder)


def find_generation_config(args: EngineArgs, source: Source) -> Path:
    """The folder whose generation_config.json holds. Raises ConfigError when there is no such folder."""
    if args.generation_config in ("auto", "vllm"):
        return source.folder
    hub = Hub.of(args.download_dir, args.hf_token)
    folder = hub.find("generation_config", args.generation_config, None, _GENERATION_CONFIG).folder
    if not (folder / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config: {folder} has no generation_config.json; give another folder, auto or vllm"
        )
    return folder


def open_source(
    folder: str | Path | None,
    load_format: str = "auto",
    draft: str | Path | None = None,
    config_folder: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    method: str | None = None,
    pooling_type: str | None = None,
    runner: str = "auto",
    convert: str = "auto",
) -> Source:
    """Read a checkpoint folder, None for the embedded model's, or with runner "pooling" the embedded embedder's;
    load_format "dummy": only its config.json, weights will be random numbers. draft: the folder of a draft model, which
    joins it: its config.json as the field "draft", its tensors with "draft:" before their names. config_folder: whose
    config.json is read in place of the folder's. overrides: fields in place of those of config.json. method: how the
    draft model drafts, where its config.json leaves that open. pooling_type: in place of what the checkpoint says. How
    vectors are made becomes the field "pooling". runner, convert: see `with_runner`.

    Without tensors the folder may still do, for an artifact that holds its weights. Raises ConfigError naming what else
    is missing or unreadable.
    """
    if folder is None:
        from graphllm.embedded import EMBEDDER_DIR, MODEL_DIR

        folder = EMBEDDER_DIR if runner == "pooling" else MODEL_DIR
    folder = Path(folder)
    if not is_folder(folder):
        raise ConfigError(
            f"model: {folder!s:.200} is not a folder; give the folder of a Hugging Face checkpoint (config.json, "
            "safetensors)"
        )
    config = _overridden(_read_config(config_folder or folder), overrides or {})
    config = _with_architecture(_text_of(config, overrides or {}))
    config = with_quantization(config, folder)
    config = with_pooling(config, folder, pooling_type)
    config = with_runner(config, folder, runner, convert)
    name = folder.resolve().name
    tensors = open_tensors(folder, load_format, draft)
    config = _with_own_head(config, tensors[0])
    if draft is None:
        return Source(folder, config, *tensors, name=name)
    start = draft_name("")
    drafter = dict(config) if Path(draft) == folder else _with_own_head(_read_config(Path(draft)), tensors[0], start)
    names = [name.removeprefix(start) for name in (tensors[0].tensors if tensors[0] else ()) if name.startswith(start)]
    method = method or _method_of(drafter, names)
    if method is None:
        drafter = _with_architecture(drafter)
    else:
        drafter["method"] = method
    if method in (None, "draft_model"):
        _check_vocabulary(folder, Path(draft))
    elif names:  # what it has beside its layers decides what it shares with the model
        drafter["tensors"] = sorted(name for name in names if "layer" not in name)
    return Source(folder, {**config, DRAFT: drafter}, *tensors, name=name, draft=Path(draft))


def _method_of(config: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """How a draft model drafts whose config.json looks like any model's."""
    if "dflash_config" in config or "hidden_norm.weight" in names:
        return "dflash"
    if "fc.weight" in names:
        return "eagle3" if any(name.startswith(("midlayer.", "d2t")) for name in names) else "eagle"
    kind = config.get("model_type")
    return kind if kind in ("medusa", "mlp_speculator") else None


def _check_vocabulary(folder: Path, draft: Path) -> None:
    """Raises ConfigError for a draft model whose tokens are other ones than the model's."""
    files = [path / "tokenizer.json" for path in (folder, draft)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    own, other = (_vocabulary(file) for file in files)
    if wrong := [token for token, number in other.items() if own.get(token, number) != number]:
        raise ConfigError(
            f"speculative_model: its token {wrong[0]!r:.40} is number {other[wrong[0]]}, the model's is "
            f"{own[wrong[0]]}; use a draft model with the same tokenizer"
        )


def _vocabulary(file: Path) -> dict[str, int]:
    """Numbers of tokens, as far as the tokenizer lists them."""
    content = read_json(file) or {}
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    return listed if isinstance(listed, dict) else {}


def open_tensors(
    folder: Path, load_format: str, draft: str | Path | None = None
) -> tuple[Checkpoint | None, WeightError | None]:
    """The headers of a folder's tensors, or why there are none; neither for load_format "dummy". draft: the folder of
    a model that joins it. Of a whole multimodal checkpoint those of its text model. Raises ConfigError for damaged
    ones."""
    if draft is not None and Path(draft) == folder:  # further layers of the model's own checkpoint
        own, absent = open_tensors(folder, load_format)
        layers = {n: t for n, t in (own.tensors if own else {}).items() if _FURTHER in n}
        return _joined((own, absent), (own and replace(own, tensors=layers), absent))
    if draft is not None:
        return _joined(open_tensors(folder, load_format), open_tensors(Path(draft), load_format))
    found, absent = _open_stored(folder, load_format)
    return found and replace(found, tensors=text_tensors(folder, found.tensors)), absent


def stored_checkpoint(folder: Path) -> Checkpoint:
    """All tensors of one folder, by their own names. Raises WeightError where there are none."""
    found, absent = _open_stored(folder, "auto")
    if found is None:
        assert absent is not None
        raise absent
    return found


def _open_stored(folder: Path, load_format: str) -> tuple[Checkpoint | None, WeightError | None]:
    """As `open_tensors`, of all tensors of one folder, by their own names."""
    if load_format == "dummy":
        return None, None
    files = weight_files(folder, load_format)
    if files and files[0].endswith(".bin"):
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise WeightError(
                folder, [f"its index names {file!r:.200}, which is not there; download it" for file in missing]
            )
        converted = Checkpoint.open(safetensors_of(folder, files))
        return Checkpoint(folder, {**converted.tensors, **_dense_tensors(folder, load_format)}), None
    try:
        own = Checkpoint.open(folder)
    except WeightError as absent:
        if files:
            raise
        return None, absent
    return replace(own, tensors={**own.tensors, **_dense_tensors(folder, load_format)}), None


def _dense_tensors(folder: Path, load_format: str) -> dict[str, TensorInfo]:
    """Those of the dense layers behind pooling, which lie in folders of their own."""
    found: dict[str, TensorInfo] = {}
    for layer in read_pooling(folder, {}).dense if (folder / MODULES).is_file() else ():
        tensors, absent = open_tensors(folder / layer.folder, load_format)
        if absent is not None:
            raise absent
        found |= {dense_tensor(layer.folder, n): t for n, t in (tensors.tensors if tensors else {}).items()}
    return found


def _joined(
    main: tuple[Checkpoint | None, WeightError | None], draft: tuple[Checkpoint | None, WeightError | None]
) -> tuple[Checkpoint | None, WeightError | None]:
    (own, absent), (drafts, absent_too) = main, draft
    if own is None or drafts is None:
        return None, absent or absent_too
    named = {draft_name(name): tensor for name, tensor in drafts.tensors.items()}
    return Checkpoint(own.folder, {**own.tensors, **named}), absent or absent_too


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"model: {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if DRAFT in config:
        raise ConfigError(f"{folder / 'config.json'}: {DRAFT} is {config[DRAFT]!r:.80}; give it by --speculative-model")
    return config


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the one and of the other. The config of a model within the model is overridden field by field."""
    merged = dict(config)
    for name, value in overrides.items():
        old = config.get(name)
        inner = isinstance(old, dict) and "model_type" in old and isinstance(value, Mapping)
        merged[name] = _overridden(old, value) if inner and old is not None else value
    return merged


def _text_of(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Of a whole multimodal model its text model's config.json. overrides: fields that are in it already."""
    if not is_multimodal(config):
        return config
    names = config["architectures"]
    _log.warning("config.json: %s is multimodal and runs as its text model: it reads no images", names[0])
    return {**text_config(config), **{n: v for n, v in overrides.items() if n != "text_config"}}


def _with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json that names no architecture gets the known one that its model_type stands for."""
    kind = config.get("model_type")
    if config.get("architectures") or not isinstance(kind, str):
        return config
    from graphllm.ir.registry import load_models

    plain = kind.removesuffix("_text").replace("_", "")
    told = [name for name in load_models() for end in _ENDINGS if name.lower() == plain + end.lower()]
    return {**config, "architectures": told} if told else config


def _with_own_head(config: dict[str, Any], checkpoint: Checkpoint | None, prefix: str = "") -> dict[str, Any]:
    """A config.json that does not tie the head to the embedding where the checkpoint has two different ones."""
    told = config.get("tie_word_embeddings")
    if told is False or checkpoint is None or not has_own_head(checkpoint.tensors, prefix):
        return config
    if told:
        _log.warning(
            "config.json: tie_word_embeddings is true, but %s is not the embedding: the head is not tied; set "
            "tie_word_embeddings to false", HEAD,
        )  # fmt: skip
    return {**config, "tie_word_embeddings": False}


# --- what is needed of a repository on the hub


def model_files(load_format: str) -> Wanted:
    """Its config, tokenizer and weights."""

    def complete(folder: Path) -> bool:
        files = weight_files(folder, load_format)
        weights = load_format == "dummy" or (files and all((folder / file).is_file() for file in files))
        dense = all(weight_files(file.parent, load_format) for file in folder.glob(_DENSE + "config.json"))
        whole = load_format == "dummy" or dense
        return bool(_CONFIG.complete(folder) and _TOKENIZER.complete(folder) and weights and whole)

    def of(names: Sequence[str]) -> list[str]:
        folders = sorted(
            {n.rpartition("/")[0] for n in names if fnmatch.fnmatchcase(n, _DENSE + "*") and n.count("/") == 1}
        )
        dense = [
            f"{folder}/{name}"
            for folder in folders
            for name in pick_weights([n.rpartition("/")[2] for n in names if n.startswith(f"{folder}/")], load_format)
        ]
        return _texts(names) + pick_weights([n for n in names if "/" not in n], load_format) + dense

    return Wanted(complete, of)


def _head_files() -> Wanted:
    """A draft head: its config and weights; its tokenizer is the model's."""

    def complete(folder: Path) -> bool:
        files = weight_files(folder)
        return _CONFIG.complete(folder) and bool(files) and all((folder / file).is_file() for file in files)

    return Wanted(complete, lambda names: _texts(names) + pick_weights([n for n in names if "/" not in n], "auto"))


def _texts(names: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, "additional_chat_templates/*.jinja")
        or fnmatch.fnmatchcase(name, "[0-9]*_*/config.json")  # sentence-transformers' modules
        or ("/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEXTS))
    ]


def _has(*patterns: str) -> Wanted:
    """One of these files, with all small ones."""
    return Wanted(lambda folder: any(p.exists() for pattern in patterns for p in folder.glob(pattern)), _texts)


_CONFIG, _TOKENIZER, _GENERATION_CONFIG = _has("config.json"), _has(*_TOKENIZERS), _has("generation_config.json")
_HEAD = _head_files()
