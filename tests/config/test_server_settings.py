"""The settings of a server: what users write, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.config.server import ServerConfig, server_config


def test_nothing_given() -> None:
    assert server_config({}) == server_config({"port": None}) == ServerConfig()


def test_texts_of_users(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("a template")
    found = server_config(
        {
            "allowed_origins": ["http://a,http://b", '["http://c"]'],
            "disable_access_log_for_endpoints": "/health,/metrics",
            "max_body_size": "1MiB",
            "root_path": "/models/chat/",
            "chat_template": str(tmp_path / "t.jinja"),
            "default_chat_template_kwargs": '{"a": 1}',
            "lora_dir": str(tmp_path),
            "api_key": ["x,y"],
        }
    )
    access, chat = found.access, found.chat
    assert access.allowed_origins == ("http://a", "http://b", "http://c")
    assert access.disable_access_log_for_endpoints == ("/health", "/metrics")
    assert (access.root_path, access.api_key) == ("/models/chat", ("x,y",))
    assert (chat.chat_template, chat.default_chat_template_kwargs) == ("a template", {"a": 1})
    assert (found.serving.max_body_size, found.models.lora_dir) == (1 << 20, str(tmp_path))
    assert server_config({"chat_template": "{{ x }}"}).chat.chat_template == "{{ x }}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_key": ["key", " "]}, "api-key is empty"),
        ({"admin_api_key": [""]}, "admin-api-key is empty"),
        ({"rate_limit_token": 0}, "rate-limit-token is 0: give a number above 0"),
        ({"rate_limit_token": 1, "rate_limit_interval": float("inf")}, "rate-limit-interval is inf"),
        ({"shutdown_timeout": -1.0}, r"shutdown-timeout is -1\.0: give seconds from 0"),
        ({"step_timeout": float("nan")}, "step-timeout is nan: give"),
        ({"api_server_count": 65}, "api-server-count is 65: it must be at least 1 and at most 64"),
        ({"sse_keep_alive_interval": -1.0}, r"sse-keep-alive-interval is -1\.0: it must be at least 0"),
        ({"max_body_size": "much"}, "max-body-size is 'much'"),
        ({"root_path": "a b"}, "root-path is 'a b': give a path such as /models/chat"),
        ({"lora_dir": "/no/where"}, "lora-dir is '/no/where': no folder"),
        ({"chat_template": "/no/where"}, "chat-template is '/no/where': no file that can be read, and no template"),
        ({"default_chat_template_kwargs": "[]"}, "default-chat-template-kwargs is '\\[]': give a JSON object"),
        ({"default_chat_template_kwargs": "{"}, "default-chat-template-kwargs is '{': no JSON"),
        ({"allowed_methods": ["[GET"]}, "allowed-methods is '\\[GET': no JSON"),
        ({"log_level": "loud"}, "log-level is 'loud': use debug, info, warning or error"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_config(given)
