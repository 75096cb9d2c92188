"""The folder of the tier on disk: one secret, one folder for each identity, and nobody reads what is not valid."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from graphllm.config import ConfigError, SchedulerConfig, TierConfig
from graphllm.loading.tiers.disk_folder import MANIFEST, SECRET, absolute_folder, open_disk_folder

IDENTITY = {"model": {"hidden_size": 8}, "weights": ["files", "ab"]}


def opened(folder: Path, secret: str | None = None, identity: dict[str, object] = IDENTITY) -> tuple[Path, str]:
    """The folder of the files, and the secret."""
    tiers = TierConfig(kv_offloading_size=1, kv_offloading_disk=str(folder), kv_offloading_disk_size=77)
    scheduler = SchedulerConfig(cache_secret=secret, snapshot_interval=5)
    found, with_secret = open_disk_folder(tiers, scheduler, identity)
    assert found.kv_offloading_disk is not None
    assert dataclasses.replace(found, kv_offloading_disk=str(folder)) == tiers
    assert dataclasses.replace(with_secret, cache_secret=secret) == scheduler
    assert with_secret.cache_secret is not None
    return Path(found.kv_offloading_disk), with_secret.cache_secret


def test_the_secret_stays(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    place, secret = opened(folder)
    assert len(secret) == 64
    assert opened(folder) == (place, secret)
    assert opened(tmp_path / "c")[1] != secret
    assert stat.S_IMODE((folder / SECRET).stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted([SECRET, place.name])
    assert secret not in (place / MANIFEST).read_text()
    assert opened(folder, secret) == (place, secret)  # the same one, given


def test_the_setting_is_a_whole_path() -> None:
    assert absolute_folder(None) is None
    assert absolute_folder("a b/ü") == str(Path.cwd() / "a b/ü")
    assert absolute_folder(Path("~/a")) == str(Path.home() / "a")
    with pytest.raises(ConfigError, match="kv_offloading_disk is '~of-nobody/a': there is no such home folder; give"):
        absolute_folder("~of-nobody/a")


def test_a_secret_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / SECRET).write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="damaged, it does not hold the secret"):
        opened(tmp_path)


def test_an_own_secret(tmp_path: Path) -> None:
    place, secret = opened(tmp_path, "mine")
    assert secret == "mine"
    assert not (tmp_path / SECRET).exists()
    assert "mine" not in (place / MANIFEST).read_text()


def test_another_secret_is_refused(tmp_path: Path) -> None:
    place, _ = opened(tmp_path, "mine")
    for other in ("yours", None):
        with pytest.raises(ConfigError, match=f"cache_secret: the files in {place} .*; give the same one again .* or "):
            opened(tmp_path, other)
    assert opened(tmp_path, "mine")[0] == place
    other_model, _ = opened(tmp_path, "yours", {**IDENTITY, "more": 1})  # whose files are its own
    assert other_model != place


def test_another_identity_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, secret = opened(tmp_path)
    (place / "file").write_text("of this model")
    with caplog.at_level(logging.INFO):
        other, same = opened(tmp_path, None, {**IDENTITY, "weights": ["files", "ac"]})
    assert (other != place, same) == (True, secret)
    assert "1 of other models or versions lie beside it" in caplog.text
    assert (place / "file").read_text() == "of this model"
    assert json.loads((other / MANIFEST).read_text())["identity"]["weights"] == ["files", "ac"]


def test_damaged_files_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, secret = opened(tmp_path)
    (place / MANIFEST).write_text("{")
    assert opened(tmp_path) == (place, secret)
    assert "was damaged" in caplog.text
    assert json.loads((place / MANIFEST).read_text())["identity"] == IDENTITY
    (tmp_path / SECRET).write_text("")
    with pytest.raises(ConfigError, match=r"secret: damaged.*; delete it"):
        opened(tmp_path)


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_what_is_no_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=rf"kv_offloading_disk is .*{folder}: it cannot be used \(.*\); give a folder"
    ):
        opened(tmp_path / folder)


_OPENS = """
import sys
from pathlib import Path
from tests.loading.tiers.test_disk_folder import opened
print("ready", flush=True)
sys.stdin.readline()
print(*opened(Path(sys.argv[1])))
"""


def test_processes_that_begin_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OPENS, str(tmp_path / "new")]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(4)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = {process.communicate(timeout=60)[0] for process in running}
    assert len(said) == 1
    assert said == {" ".join(map(str, opened(tmp_path / "new"))) + "\n"}
