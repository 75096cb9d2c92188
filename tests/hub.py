"""A Hugging Face hub for tests: its cache in a folder, and a small server that speaks as much of its API as downloads
need."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

MISSING, GATED = "RepoNotFound", "GatedRepo"


def commit_of(name: str) -> str:
    """A commit id, the same for the same words."""
    return hashlib.sha1(name.encode()).hexdigest()


def fill_cache(cache: Path, name: str, files: Mapping[str, bytes], revision: str = "main", commit: str = "") -> Path:
    """Put a model into a cache folder, as the hub's library lays it out; its snapshot."""
    commit = commit or commit_of(name)
    root = cache / ("models--" + name.replace("/", "--"))
    snapshot = root / "snapshots" / commit
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(blob)
    (root / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    return snapshot


def files_of(folder: Path, *without: str) -> dict[str, bytes]:
    """The contents of a folder's files."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name not in without}


class HubServer:
    """models: the files of each by name, or the error that it is. asked: method and path of every request."""

    def __init__(self) -> None:
        self.models: dict[str, Mapping[str, bytes] | str] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        asked = re.fullmatch(r"/(?:api/models/)?(.*?)/(revision|tree|resolve)/([^/]*)/?(.*)", path)
        assert asked is not None, path
        head, kind, revision, file = asked.groups()
        model = self.models.get(head, MISSING)
        if isinstance(model, str):
            return {MISSING: 404, GATED: 403}[model], {"X-Error-Code": model}, b"{}"
        commit = commit_of(head)
        if revision not in ("main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if kind != "resolve":
            siblings = [{"rfilename": name} for name in model]
            tree = [{"type": "file", "path": name, "size": len(data), "oid": ""} for name, data in model.items()]
            told = tree if kind == "tree" else {"id": head, "modelId": head, "sha": commit, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
        data = model[file]
        return 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}, data


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    """A server that runs."""
    hub = HubServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.asked.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("Authorization"))
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 (the library's name)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
