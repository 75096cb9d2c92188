"""The folder in which engines of one user on one host meet: a Unix socket for each engine, named by its id, and the
secret of those that were given none."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphllm.config import ConfigError
from graphllm.config.vllm.kv_transfer import is_engine_id

_SECRET, _ENDING = "secret", ".sock"
_OTHERS = 64  # engines that may have asked for one id, as the cores of one server do


def meeting_folder(config: Mapping[str, Any]) -> Path:
    """The folder, which is there and only this user's. config: kv_connector_extra_config. Raises ConfigError."""
    given = config.get("folder")
    if given is not None and (not isinstance(given, str) or not given):
        raise ConfigError(f"kv_transfer_config: folder is {given!r:.80}: give a path")
    usual = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/graphllm-{os.getuid()}") / "graphllm-kv"
    folder = usual if given is None else Path(given).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as failure:
        raise _unusable(folder, failure.strerror or str(failure)) from failure
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise _unusable(folder, "others than this user may enter it")
    return folder


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"kv_transfer_config: engines meet in {folder}, which cannot be used ({why}); give another one as folder in "
        "kv_connector_extra_config, the same to all engines"
    )


def folder_secret(folder: Path) -> str:
    """The secret of the folder, which is made where there is none. Engines that begin at once agree on one."""
    file, new = folder / _SECRET, folder / f".{secrets.token_hex(8)}"
    if not file.exists():
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as opened:
            opened.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(new, file)
        new.unlink()
    return file.read_text().strip()


def socket_of(folder: Path, engine_id: str) -> Path:
    """Where an engine listens."""
    return folder / f"{engine_id}{_ENDING}"


def engines_in(folder: Path) -> list[str]:
    """The engines that listen there; some may be gone."""
    return sorted(p.name.removesuffix(_ENDING) for p in folder.glob(f"*{_ENDING}"))


def listen(folder: Path, wanted: str) -> tuple[str, socket.socket]:
    """An engine's id, and the socket that it listens on. wanted: the id; where another engine has it, a number follows;
    "": one that nobody else has."""
    for engine in engines_in(folder):
        _remove_dead(socket_of(folder, engine))
    wanted = wanted or secrets.token_hex(8)
    for number in range(_OTHERS):
        id = f"{wanted}-{number}" if number else wanted
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(socket_of(folder, id)) as path:
                listener.bind(path)
        except OSError:
            listener.close()
            continue
        listener.listen(64)
        return id, listener
    raise ConfigError(
        f"kv_transfer_config: engine_id is {wanted!r}: {_OTHERS} engines in {folder} have it; give another one"
    )


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A path as sockets take it, which is short, however long the folder's is."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _remove_dead(path: Path) -> None:
    """Remove the socket of an engine that is gone without having done so."""
    try:
        _connected(path, 1).close()
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError:
        return


def connect(folder: Path, engine_id: str, timeout: float) -> socket.socket:
    """A connection to an engine. Raises OSError when it is not there."""
    if not is_engine_id(engine_id):
        raise ConnectionError("that is no id of an engine")
    return _connected(socket_of(folder, engine_id), timeout)


def _connected(path: Path, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection
