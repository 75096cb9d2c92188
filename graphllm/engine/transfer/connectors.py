"""How a connector is found: its own name, what packages offer, or a class in a module."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from graphllm.config import ConfigError, KVTransferConfig
from graphllm.engine.transfer.host_connector import HostConnector
from graphllm.engine.transfer.kv_connector import KVConnector
from graphllm.host.importing import imported

GROUP = "graphllm.kv_connectors"
_OWN: dict[str, type[KVConnector]] = {"HostConnector": HostConnector}


def find_connector(config: KVTransferConfig) -> type[KVConnector]:
    """The class that the settings name. Raises ConfigError when there is none of that name."""
    name, module = config.kv_connector, config.kv_connector_module_path
    found: Any = None
    if module:
        found = imported("kv_transfer_config: kv_connector_module_path", f"{module}:{name}")
    elif ":" in name:
        found = imported("kv_transfer_config: kv_connector", name)
    else:
        found = _OWN.get(name) or next((entry.load() for entry in entry_points(group=GROUP, name=name)), None)
    if found is None:
        offered = sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})
        raise ConfigError(
            f"kv_transfer_config: kv_connector is {name!r:.80}: there are {', '.join(offered)}; install a package that "
            f"offers it under the entry point group {GROUP}, or give kv_connector_module_path, too"
        )
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ConfigError(
            f"kv_transfer_config: kv_connector is {name!r:.80}: it is no class derived from "
            f"{KVConnector.__module__}.{KVConnector.__name__}"
        )
    found.check(config)
    return found
