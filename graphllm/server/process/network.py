"""What a server needs of the machine before it loads anything: its socket, its certificate, room for connections."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from graphllm.config import ConfigError
from graphllm.config.server import ListenConfig

BACKLOG = 2048
_UNSENT = 128 << 10  # bytes for each client who does not read; the kernel would keep megabytes
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h


def prepare_process() -> None:
    """Of a process that many connect to."""
    # Memory of large bodies goes back at once: by default, the first that is freed makes the C library keep more.
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    mallopt(_M_ARENA_MAX, 2)
    # A connection is a file, and the soft limit is often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def listening(config: ListenConfig) -> Iterator[socket.socket]:
    """Bound before anything is loaded, so that a port in use is said at once."""
    if config.uds is not None:
        path = config.uds
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"uds is {str(path)!r}: that is a file; give a path for a socket")
            _check_unused(path)
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        target: str | tuple[str, int] = str(path)
    else:
        listener, target = _tcp(config.host), (config.host, config.port)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)  # connections have it from here
        try:
            listener.bind(target)
            listener.listen(BACKLOG)
        except (OSError, OverflowError) as problem:
            where = f"uds is {str(target)!r}" if config.uds else f"port is {config.port}"
            raise ConfigError(f"{where}: cannot listen there ({problem}); give another one") from problem
        yield listener
    finally:
        listener.close()
        if config.uds is not None:
            config.uds.unlink(missing_ok=True)


def _tcp(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as problem:
        raise ConfigError(
            f"host is {host!r}: no address of this machine ({problem}); give 127.0.0.1 or 0.0.0.0"
        ) from problem
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def _check_unused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # of a server that was killed
    raise ConfigError(f"uds is {str(path)!r}: another server listens there; give another path")


def read_tls(config: ListenConfig) -> ssl.SSLContext | None:
    """Read before anything is loaded, so that a bad file is said at once. Raises ConfigError."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if value := getattr(config, name):
                option = name.replace("_", "-")
                raise ConfigError(f"{option} is {str(value)!r}: it has a meaning only with --ssl-certfile")
        return None
    if config.ssl_cert_reqs not in (0, 1, 2) or (config.ssl_cert_reqs and config.ssl_ca_certs is None):
        raise ConfigError(
            f"ssl-cert-reqs is {config.ssl_cert_reqs}: give 0 (no certificates of clients), or 1 (they may have "
            "one) or 2 (they must) with --ssl-ca-certs"
        )
    for name, path in (
        ("certfile", config.ssl_certfile),
        ("keyfile", config.ssl_keyfile),
        ("ca-certs", config.ssl_ca_certs),
    ):
        if path is not None:
            try:
                path.read_bytes()
            except OSError as problem:
                raise ConfigError(f"ssl-{name} is {str(path)!r}: cannot be read ({problem.strerror})") from problem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    try:
        # A password that is asked for would wait for somebody at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except OSError as problem:
        key = str(config.ssl_keyfile or config.ssl_certfile)
        raise ConfigError(
            f"ssl-certfile is {str(config.ssl_certfile)!r}: with the key in {key!r} it cannot be used ({problem}); "
            "give a certificate in PEM and its own key, without a password"
        ) from problem
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as problem:
            raise ConfigError(
                f"ssl-ca-certs is {str(config.ssl_ca_certs)!r}: no certificates in PEM ({problem})"
            ) from problem
    return context
