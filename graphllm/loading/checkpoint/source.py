"""A model as a user names it: its files are found, read and checked as far as their headers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.fields import Fields
from graphllm.embedded import DRAFTS, EMBEDDER_DIR, MODEL_DIR
from graphllm.loading.checkpoint.conversion import tokenizer_folder
from graphllm.loading.checkpoint.hub import Hub
from graphllm.loading.checkpoint.model_config import (
    draft_config,
    draft_method,
    overridden,
    stored_config,
    text_of,
    with_architecture,
    with_implementation,
    with_own_head,
    with_pooling,
    with_quantization,
    with_runner,
)
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.loading.checkpoint.tensors import Tensors, open_tensors
from graphllm.loading.checkpoint.wanted import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    DraftHead,
    WholeModel,
)
from graphllm.weights.checkpoint.checkpoint import DRAFT, Checkpoint, WeightError, draft_name, fingerprint


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, opened.

    files: what its JSON files say.
    config: config.json as the engine computes it.
    checkpoint: the headers of its tensors; None where there are none.
    absent: why there are no tensors, where they were asked for.
    name: the model's name, for people.
    commit: of the hub's repository; None for a folder of the user's own.
    draft: the folder of the draft model that joins it.
    asked: what `open_source` was given, by name, as JSON.
    """

    files: ModelFiles
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    absent: WeightError | None = None
    name: str = ""
    commit: str | None = None
    draft: Path | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the checkpoint's files are."""
        return self.files.folder

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
    whole = WholeModel(args.load_format)
    model = None if args.model is None else hub.locate("model", args.model, args.revision, whole)
    draft = _draft_folder(args, hub, whole, model.folder if model else None)
    config = None
    if args.hf_config_path is not None:
        config = hub.locate("hf_config_path", args.hf_config_path, None, CONFIG).folder
    source = open_source(
        model.folder if model else None, args.load_format, draft, config, args.hf_overrides, args.speculative_method,
        args.pooling_type, args.runner, args.convert, args.model_impl,
    )  # fmt: skip
    return replace(source, name=model.name, commit=model.commit) if model else source


def _draft_folder(args: EngineArgs, hub: Hub, whole: WholeModel, model: Path | None) -> Path | None:
    """The folder of what drafts: what is named, the model's own for layers of its checkpoint, or one that comes with
    the embedded model. Raises ConfigError when there is none."""
    method, named = args.speculative_method, args.speculative_model
    if named is not None:
        wanted = whole if method in (None, "draft_model") else DraftHead()
        return hub.locate("speculative_model", named, None, wanted).folder
    if method is None:
        return None
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
        folder = source.folder
    else:
        hub = Hub.of(args.download_dir, args.hf_token)
        folder = hub.locate("tokenizer", args.tokenizer, args.tokenizer_revision, TOKENIZER).folder
    return tokenizer_folder(folder)


def find_generation_config(args: EngineArgs, source: Source) -> Fields:
    """The generation_config.json of these settings: the checkpoint's, or that of another folder. Raises ConfigError
    when there is no such folder, and for a damaged file."""
    if args.generation_config in ("auto", "vllm"):
        return source.files.generation
    hub = Hub.of(args.download_dir, args.hf_token)
    folder = hub.locate("generation_config", args.generation_config, None, GENERATION_CONFIG).folder
    if not (folder / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config: {folder} has no generation_config.json; give another folder, auto or vllm"
        )
    return ModelFiles.read(folder).generation


def open_source(
    folder: str | Path | None,
    load_format: str = "auto",
    draft: str | Path | None = None,
    config_folder: str | Path | None = None,
    overrides: Fields | None = None,
    method: str | None = None,
    pooling_type: str | None = None,
    runner: str = "auto",
    convert: str = "auto",
    model_impl: str = "auto",
) -> Source:
    """Read a checkpoint folder.

    folder: None for the embedded model's, or with runner "pooling" the embedded embedder's.
    load_format: with "dummy" only config.json is read, and the weights will be random numbers.
    draft: the folder of a draft model, which joins it: its config.json becomes the field "draft", and its tensors get
        "draft:" before their names.
    config_folder: its config.json is read in place of the folder's.
    overrides: fields in place of the fields of config.json.
    method: how the draft model drafts, where its config.json leaves that open.
    pooling_type: in place of what the checkpoint says; how vectors are made becomes the field "pooling".
    runner, convert: see `with_runner`.
    model_impl: see `with_implementation`; a draft model has its own family where there is one.

    Without tensors the folder may still do, for an artifact that holds its weights. Raises ConfigError naming what else
    is missing or unreadable.
    """
    asked = {
        "folder": None if folder is None else str(Path(folder).resolve()), "load_format": load_format,
        "draft": None if draft is None else str(Path(draft).resolve()),
        "config_folder": None if config_folder is None else str(Path(config_folder).resolve()),
        "overrides": None if overrides is None else dict(overrides), "method": method, "pooling_type": pooling_type,
        "runner": runner, "convert": convert, "model_impl": model_impl,
    }  # fmt: skip
    files = _read(folder, runner)
    config = stored_config(ModelFiles.read(Path(config_folder)) if config_folder else files)
    config = overridden(config, overrides or {})
    config = with_architecture(text_of(config, overrides or {}))
    config = with_quantization(config, files)
    config = with_pooling(config, files, pooling_type)
    config = with_implementation(with_runner(config, files, runner, convert), model_impl)
    drafter = None
    if draft is not None:
        drafter = files if Path(draft) == files.folder else ModelFiles.read(Path(draft))
    tensors = open_tensors(files, load_format, drafter)
    config = with_own_head(config, tensors.checkpoint)
    if drafter is not None:
        config = {**config, DRAFT: _draft_config(config, files, drafter, tensors, method)}
    return Source(
        files,
        config,
        tensors.checkpoint,
        tensors.absent,
        name=files.folder.resolve().name,
        draft=None if drafter is None else drafter.folder,
        asked=asked,
    )


def _read(folder: str | Path | None, runner: str) -> ModelFiles:
    if folder is None:
        folder = EMBEDDER_DIR if runner == "pooling" else MODEL_DIR
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"model: {folder!s:.200} is not a folder; give the folder of a Hugging Face checkpoint (config.json, "
            "safetensors)"
        )
    return ModelFiles.read(folder)


def _draft_config(
    config: dict[str, Any], files: ModelFiles, drafter: ModelFiles, tensors: Tensors, method: str | None
) -> dict[str, Any]:
    """The field "draft". config: the model's. drafter: the draft model's files, or ``files`` themselves for further
    layers of the model's own checkpoint."""
    start = draft_name("")
    found = dict(config) if drafter is files else with_own_head(stored_config(drafter), tensors.checkpoint, start)
    named = tensors.checkpoint.tensors if tensors.checkpoint else ()
    names = [name.removeprefix(start) for name in named if name.startswith(start)]
    method = method or draft_method(found, names)
    if method in (None, "draft_model"):
        _check_vocabulary(files, drafter)
    return draft_config(found, method, names)


def _check_vocabulary(model: ModelFiles, draft: ModelFiles) -> None:
    """Raise ConfigError where tokens of a draft model have other numbers than in the model."""
    files = [found.folder / "tokenizer.json" for found in (model, draft)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    own, other = (found.vocabulary.tokens if found.vocabulary else {} for found in (model, draft))
    if wrong := [token for token, number in other.items() if own.get(token, number) != number]:
        raise ConfigError(
            f"speculative_model: its token {wrong[0]!r:.40} is number {other[wrong[0]]}, the model's is "
            f"{own[wrong[0]]}; use a draft model with the same tokenizer"
        )
