"""The folder kv_offloading_disk: who may use it, and where in it the files of one model lie.

``secret`` is the secret of all engines that were given none. Each identity has a folder, named by its digest, with
``manifest.json``: the identity in clear, and a check of the secret that the names of its files were made with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError, SchedulerConfig, TierConfig
from graphllm.loading.tiers.identity import identity_key

SECRET, MANIFEST = "secret", "manifest.json"
_log = logging.getLogger(__name__)
_ROUNDS = 50_000  # of the check: a secret that people choose may be guessed
_HEX = re.compile(r"[0-9a-f]{64}\n?")


def absolute_folder(folder: str | Path | None) -> str | None:
    """The setting as processes with other working directories find it. Raises ConfigError for a "~" that is nobody's
    home."""
    if folder is None:
        return None
    try:
        return str(Path(folder).expanduser().absolute())
    except RuntimeError as failure:
        raise ConfigError(
            f"kv_offloading_disk is {str(folder)!r:.80}: there is no such home folder; give the whole path"
        ) from failure


def open_disk_folder(
    tiers: TierConfig, scheduler: SchedulerConfig, identity: Mapping[str, Any]
) -> tuple[TierConfig, SchedulerConfig]:
    """The settings with the folder of this identity, which is there, and with the secret of its files.

    Raises ConfigError where the folder cannot be used, or its files have another secret.
    """
    root = Path(tiers.kv_offloading_disk or "")
    try:
        root.mkdir(parents=True, exist_ok=True)
        secret = scheduler.cache_secret
        if secret is None:
            secret = _own_secret(root)
        place = root / identity_key(identity)
        place.mkdir(mode=0o700, exist_ok=True)
        _check_manifest(place, identity, secret)
        others = sum(1 for other in root.iterdir() if other != place and (other / MANIFEST).exists())
    except OSError as failure:
        raise ConfigError(
            f"kv_offloading_disk is {root}: it cannot be used ({failure.strerror}); give a folder that this user can "
            "write to, or leave it out"
        ) from failure
    more = f"; {others} of other models or versions lie beside it, and may be deleted" if others else ""
    _log.info("kv_offloading_disk: files of this model are in %s%s", place, more)
    return (
        dataclasses.replace(tiers, kv_offloading_disk=str(place)),
        dataclasses.replace(scheduler, cache_secret=secret),
    )


def _own_secret(root: Path) -> str:
    """The folder's secret, which is made where there is none. Processes that begin at once agree on one."""
    file = root / SECRET
    if not file.exists():
        _create(file, secrets.token_hex(32) + "\n")
    found = file.read_text(errors="replace")
    if not _HEX.fullmatch(found):
        raise ConfigError(
            f"{file}: damaged, it does not hold the secret of the folder's files; delete it, and with it the folders "
            "beside it, or give the cache_secret that they were made with"
        )
    return found.strip()


def _check_manifest(place: Path, identity: Mapping[str, Any], secret: str) -> None:
    """Raise ConfigError where the files of a folder were named with another secret."""
    check = hashlib.pbkdf2_hmac("sha256", secret.encode(), place.name.encode(), _ROUNDS).hex()
    file, text = place / MANIFEST, json.dumps({"identity": identity, "secret": check}, indent=1, sort_keys=True)
    if not file.exists():
        _create(file, text)
    try:
        found = json.loads(file.read_text())["secret"]
    except (ValueError, KeyError, TypeError):
        _log.warning("%s was damaged; it is written anew", file)
        file.unlink()
        _create(file, text)
        return
    if found != check:
        raise ConfigError(
            f"cache_secret: the files in {place} were made with another one; give the same one again (or none, where "
            "none was given), give another kv_offloading_disk, or delete that folder"
        )


def _create(file: Path, text: str) -> None:
    """Make a file that appears whole; what another process has made in the meantime stays."""
    new = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(new, file)
        except FileExistsError:
            pass
        except OSError as failure:
            if failure.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.replace(new, file)  # a file system without links
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
