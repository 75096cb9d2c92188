"""Models by name: a folder on this machine, the cache of the Hugging Face hub, or a download from the hub.

The cache is read here; the hub's own library is imported for downloads only. A folder that exists comes first, what
looks like a path is never looked up, and no code is ever downloaded.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import NamedTuple

from graphllm.config import ConfigError, Env
from graphllm.config.fields import is_folder
from graphllm.embedded import SHIPPED
from graphllm.loading.checkpoint.gguf_folder import gguf_folder, gguf_named
from graphllm.loading.checkpoint.wanted import Wanted

_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BRANCH = "main"


class Found(NamedTuple):
    """A model's folder. name: what people call it. commit: of the hub's repository, None for a folder of one's own."""

    folder: Path
    name: str
    commit: str | None = None


class Hub(NamedTuple):
    """Where models are looked up. cache: in the layout of the hub's library. token: for private and gated ones, None
    for the one that `hf auth login` left."""

    cache: Path
    offline: bool = False
    token: str | bool | None = None

    @classmethod
    def of(cls, download_dir: str | Path | None, token: str | bool | None) -> Hub:
        """That of this process. download_dir: in place of the usual cache."""
        env = Env.read()
        return cls(Path(download_dir) if download_dir else env.hub_cache, env.offline, token)

    def locate(self, setting: str, given: str | Path, revision: str | None, wanted: Wanted) -> Found:
        """The folder that a setting means. Raises ConfigError when there is none, or none can be had."""
        folder = Path(given).expanduser()
        if not is_folder(folder):
            folder = SHIPPED.get(str(given), folder)
        if (file := gguf_named(folder)) is not None:
            return Found(gguf_folder(file), name_of(given))
        if is_folder(folder):
            if revision not in (None, _BRANCH):
                raise ConfigError(
                    f"revision is {revision!r:.80}: {setting} is a folder on this machine ({folder}); leave it out"
                )
            return Found(folder, name_of(given))
        if not is_name(given):
            raise ConfigError(
                f"{setting}: {given!s:.200} is not a folder; give that of a Hugging Face checkpoint (config.json, "
                "safetensors), or a name of its hub, such as Qwen/Qwen3-0.6B"
            )
        name, revision = str(given), revision or _BRANCH
        if not _REVISION.fullmatch(revision):
            raise ConfigError(f"revision is {revision!r:.80}: give a branch, a tag or a commit of {name}")
        there = self._cached(name, revision)
        if there is not None and (self.offline or wanted.complete(there)):
            return Found(there, name, there.name)
        if self.offline:
            raise ConfigError(
                f"{setting}: {name} ({revision}) is neither a folder nor in the cache {self.cache}, and HF_HUB_OFFLINE "
                f"forbids to download it; unset that, or run `hf download {name}` where the network is"
            )
        there = self._download(setting, name, revision, wanted)
        return Found(there, name, there.name)

    def _cached(self, name: str, revision: str) -> Path | None:
        """Its snapshot in the cache, complete or not."""
        repository = self.cache / "--".join(["models", *name.split("/")])
        try:
            commit = revision if _COMMIT.fullmatch(revision) else (repository / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return None
        snapshot = repository / "snapshots" / commit
        return snapshot if _COMMIT.fullmatch(commit) and is_folder(snapshot) else None

    def _download(self, setting: str, name: str, revision: str, wanted: Wanted) -> Path:
        """Bring what is wanted into the cache, with a bar for its progress; the snapshot. Raises ConfigError."""
        from huggingface_hub import HfApi, errors, snapshot_download

        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        page = f"{endpoint.rstrip('/')}/{name}"
        try:
            info = HfApi(endpoint, token=self.token).model_info(name, revision=revision)
            files = wanted.of([file.rfilename for file in info.siblings or ()])
            patterns = [glob.escape(file) for file in files]
            place = snapshot_download(
                name, revision=revision, cache_dir=self.cache, endpoint=endpoint, token=self.token,
                allow_patterns=patterns, ignore_patterns=["*.py"],
            )  # fmt: skip
        except errors.GatedRepoError as refusal:
            raise ConfigError(
                f"{setting}: {name} is gated; accept its terms at {page}, and give your token by --hf-token, HF_TOKEN "
                "or `hf auth login`"
            ) from refusal
        except errors.RepositoryNotFoundError as refusal:
            raise ConfigError(
                f"{setting}: {name} is neither a folder here nor a model at {endpoint}; look at its spelling, and if "
                "it is private give your token by --hf-token, HF_TOKEN or `hf auth login`"
            ) from refusal
        except errors.RevisionNotFoundError as refusal:
            raise ConfigError(
                f"revision is {revision!r:.80}: {name} has none of this name; {page}/tree/main lists branches and tags"
            ) from refusal
        except ConfigError:
            raise
        except Exception as failure:  # of the library, of its HTTP client, of the disk
            reason = " ".join(str(failure).split())
            raise ConfigError(
                f"{setting}: {name} cannot be downloaded from {endpoint} to {self.cache} ({reason:.200}); look at the "
                "network, at HF_ENDPOINT and at the room on the disk, and run it again to go on; or give a folder"
            ) from failure
        return Path(place)


def name_of(given: str | Path) -> str:
    """What people call a model: a folder by its own name, others as they are given."""
    folder = Path(given).expanduser()
    return folder.resolve().name if is_folder(folder) or not is_name(given) else str(given)


def is_name(given: str | Path) -> bool:
    """Whether it could be a model's name on the hub, and does not look like a path."""
    return (
        isinstance(given, str)
        and _NAME.fullmatch(given) is not None
        and not given.endswith((".safetensors", ".gguf", ".git"))
        and "--" not in given
        and ".." not in given
    )
