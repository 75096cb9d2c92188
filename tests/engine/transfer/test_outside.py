"""Connectors of packages: found by entry point and by module, and told what the protocol says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError, KVTransferConfig, TierConfig
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.tiers import Tiers
from graphllm.engine.transfer.connectors import GROUP, find_connector
from tests.engine.harness import finish, open_core, request
from tests.engine.transfer import folder_connector
from tests.engine.transfer.engines import asking

PROMPT = [(11 * i) % 89 + 1 for i in range(45)]
MODULE = folder_connector.__name__


def open_with(checkpoint: Path, artifact: Path, place: Path, **config: Any) -> EngineCore:
    """A core with a connector to the files in ``place``."""
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"place": str(place)}, **config}
    return open_core(checkpoint, artifact, tiers=TierConfig(4 << 20, kv_transfer_config=config), cache_secret="s")


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is installed that offers a connector."""
    info = tmp_path / "site" / "folder_connector-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: folder-connector\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfolder = {MODULE}:FolderConnector\n")
    monkeypatch.syspath_prepend(str(info.parent))


def test_contents_outlive_an_engine(checkpoint: Path, eager_artifact: Path, tmp_path: Path, offered: None) -> None:
    place = tmp_path / "files"
    place.mkdir()
    first = open_with(checkpoint, eager_artifact, place, kv_connector="folder")
    expected = finish(first, [request("a", PROMPT, asking(6))])["a"]
    first.close()
    assert len(list(place.iterdir())) == 6  # full blocks of prompt and output
    second = open_with(
        checkpoint, eager_artifact, place, kv_connector="PatientConnector", kv_connector_module_path=MODULE
    )
    second.add(request("b", PROMPT, asking(6, mark="mine")))
    updates = [update for _ in iter(lambda: second.unfinished, 0) for update in second.step()]
    assert [token for update in updates for token in update.tokens] == expected.tokens
    assert updates[0].cached == 40
    assert updates[-1].kv_transfer_params == {"blocks": 5, "mark": "mine"}
    connector = second.part(Tiers).connector
    assert isinstance(connector, folder_connector.PatientConnector)
    assert connector.asked == 4
    assert second.stats().tiers["connector"].copied_bytes > 0
    second.close()


def test_the_guide_has_the_whole_connector() -> None:
    guide = Path(__file__).parents[3] / "docs" / "disaggregated-prefill.md"
    code = Path(folder_connector.__file__).read_text().partition("\n\nclass PatientConnector")[0]
    assert code.rstrip() in guide.read_text()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"kv_connector": "LMCacheConnectorV1"},
            "kv_connector is 'LMCacheConnectorV1': there are HostConnector, (.*, )?folder; install",
        ),
        ({"kv_connector": "Nothing", "kv_connector_module_path": MODULE}, "cannot be imported"),
        ({"kv_connector": "FolderWorker", "kv_connector_module_path": MODULE}, "it is no class derived from"),
    ],
)
def test_connectors_that_are_not_there(offered: None, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_connector(KVTransferConfig(**config))
