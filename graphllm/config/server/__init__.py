"""The settings of a server."""

from graphllm.config.server.settings import (
    AccessConfig,
    ChatConfig,
    ListenConfig,
    ModelsConfig,
    RanksConfig,
    ServerConfig,
    ServerLogConfig,
    ServingConfig,
    WatchConfig,
    server_config,
)

__all__ = [
    "AccessConfig",
    "ChatConfig",
    "ListenConfig",
    "ModelsConfig",
    "RanksConfig",
    "ServerConfig",
    "ServerLogConfig",
    "ServingConfig",
    "WatchConfig",
    "server_config",
]
