"""Connectors over a network: engines that meet at TCP ports and know each other by a secret. `test_processes` has them
with their libraries, where these are installed."""

from __future__ import annotations

import socket
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError, KVTransferConfig, TierConfig
from graphllm.engine.core import EngineCore
from graphllm.engine.transfer import network_connectors
from graphllm.engine.transfer.connectors import GROUP, find_connector
from graphllm.engine.transfer.frames import Challenge, Frames, Refused, Welcome
from graphllm.engine.transfer.network_connectors import MooncakeConnector, NixlConnector
from graphllm.engine.transfer.peer_identity import Address, PeerIdentity
from tests.engine.harness import finish, open_core, request
from tests.engine.transfer import near_library
from tests.engine.transfer.engines import asking, prefilled

PROMPT = [(7 * i) % 89 + 1 for i in range(45)]
BLOCKS_OF_PROMPT = 40  # tokens: the last one is always computed, and blocks have 8

Open = Callable[..., EngineCore]


@pytest.fixture
def opened(checkpoint: Path, eager_artifact: Path) -> Iterator[Open]:
    """opened(role, **more): a core that meets others at a port of this machine."""
    cores = list[EngineCore]()

    def start(role: str, secret: str | None = "s", **more: Any) -> EngineCore:
        config = {"kv_connector": "NearConnector", "kv_connector_module_path": near_library.__name__,
                  "kv_role": role, "kv_port": 0, **more}  # fmt: skip
        tiers = TierConfig(4 << 20, kv_transfer_config=config)
        cores.append(open_core(checkpoint, eager_artifact, tiers=tiers, cache_secret=secret))
        return cores[-1]

    yield start
    for core in cores:
        core.close()
    near_library.FAILING.clear()
    assert not near_library.OPEN


@pytest.fixture(scope="module")
def expected(checkpoint: Path, eager_artifact: Path) -> list[int]:
    """What a core of its own says."""
    core = open_core(checkpoint, eager_artifact)
    found = finish(core, [request("alone", PROMPT, asking(6))])["alone"].tokens
    core.close()
    return found


def test_a_prompt_travels(opened: Open, expected: list[int]) -> None:
    first, second = opened("kv_producer"), opened("kv_consumer")
    params = prefilled(first, "p", PROMPT)
    assert params["remote_host"] == "127.0.0.1"
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected, BLOCKS_OF_PROMPT)
    assert [endpoint.peers for endpoint in near_library.OPEN if endpoint.peers] == [["near"]]


def test_an_endpoint_that_failed_is_used_no_more(
    opened: Open, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It may still write late: it is closed before its entries get another use."""
    first, second = opened("kv_producer"), opened("kv_consumer")
    for moment, cached in (("first", 0), ("again", BLOCKS_OF_PROMPT)):
        near_library.FAILING[:] = ["the cable was cut"] if moment == "first" else []
        second.reset_prefix_cache()
        params = prefilled(first, moment, PROMPT)
        found = finish(second, [request(f"d-{moment}", PROMPT, asking(6, **params))])[f"d-{moment}"]
        assert (found.tokens, found.cached) == (expected, cached)
        used = [endpoint.peers for endpoint in near_library.OPEN if endpoint.peers]
        assert used == ([] if moment == "first" else [["near"]])
    assert "the cable was cut" in caplog.text
    assert "could not be read" in caplog.text


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"remote_host": "127.0.0.1", "remote_port": 1}, "engine 'e' is not there"),
        ({"remote_host": "a..b", "remote_port": 1}, "engine 'e' is not there"),
        ({"remote_host": "127.0.0.1", "remote_port": 1 << 40}, "engine 'e' is not there"),
        ({"remote_host": None, "remote_port": "x"}, "engine 'e' is not there"),
        ({"remote_engine_id": "\ud800"}, "that is no id of an engine"),
    ],
)
def test_addresses_that_clients_made_up(
    opened: Open, expected: list[int], caplog: pytest.LogCaptureFixture, params: dict[str, Any], says: str
) -> None:
    second = opened("kv_consumer")
    named = {"do_remote_prefill": True, "remote_engine_id": "e", **params}
    found = finish(second, [request("d", PROMPT, asking(6, **named))])["d"]
    assert (found.tokens, found.cached) == (expected, 0)
    assert says in caplog.text


def test_another_engine_at_the_address(opened: Open, expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    first, second = opened("kv_producer"), opened("kv_consumer")
    params = {**prefilled(first, "p", PROMPT), "remote_engine_id": "before"}
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected, 0)
    assert "another engine has its address now" in caplog.text


def test_another_secret_is_refused(opened: Open, expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    first, second = opened("kv_producer", secret="a"), opened("kv_consumer", secret="b")
    params = prefilled(first, "p", PROMPT)
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected, 0)
    assert "it has another cache_secret; give the same to both" in caplog.text


class Impostor:
    """A server that a client names, and that does not know the secret. It passes on what it hears to ``engine``, or
    else welcomes everybody."""

    def __init__(self, engine: tuple[str, int] | None) -> None:
        self._listener, self._engine = socket.create_server(("127.0.0.1", 0)), engine
        self.port = self._listener.getsockname()[1]
        self.answers = list[Any]()  # of the engine that it has called
        self.found = False  # whether it was asked for contents
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        caller = Frames(connection)
        if self._engine is None:
            caller.send(Challenge(bytes(16)))
            caller.asked()
            caller.send(Welcome(bytes(32), [{"shapes": {}}]))
        else:
            engine = Frames(socket.create_connection(self._engine))
            caller.send(engine.answer())
            engine.send(caller.asked())
            self.answers.append(engine.answer())
            caller.send(self.answers[0])
            engine.close()
        try:
            caller.asked()
            self.found = True
        except OSError:
            pass
        caller.close()

    def close(self) -> None:
        """Wait for its end."""
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize("passes_on", [False, True])
def test_nobody_without_the_secret_gives_or_gets_contents(
    opened: Open, expected: list[int], caplog: pytest.LogCaptureFixture, passes_on: bool
) -> None:
    first, second = opened("kv_producer"), opened("kv_consumer")
    params = prefilled(first, "p", PROMPT)
    between = Impostor((params["remote_host"], params["remote_port"]) if passes_on else None)
    found = finish(second, [request("d", PROMPT, asking(6, **params | {"remote_port": between.port}))])["d"]
    between.close()
    assert (found.tokens, found.cached, between.found) == (expected, 0, False)
    assert all(isinstance(answer, Refused) for answer in between.answers)
    assert ("it has another cache_secret" if passes_on else "it does not know the cache_secret") in caplog.text


def test_a_proof_is_of_one_challenge_and_one_address() -> None:
    own, called = PeerIdentity("model", b"secret", 1), Address("e", "10.0.0.1", 7)
    challenge = own.challenge()
    hello = own.hello(challenge, called)
    assert own.refusal(challenge, hello, called) == ""
    assert own.trusts(Welcome(own.welcome(hello, called), []), hello, called)
    for other in (called._replace(host="10.0.0.2"), called._replace(port=8)):
        assert "cache_secret" in own.refusal(challenge, hello, other)
        assert not own.trusts(Welcome(own.welcome(hello, other), []), hello, called)
    assert "cache_secret" in own.refusal(own.challenge(), hello, called)
    assert not own.trusts(Welcome(hello.proof, []), hello, called)


def test_the_port_after_a_taken_one(opened: Open) -> None:
    """As the cores of one server have them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        params = prefilled(opened("kv_producer", kv_port=port, engine_id="e"), "p", PROMPT)
    assert params["remote_port"] > port
    assert params["remote_engine_id"] == f"e-{params['remote_port']}"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kv_ip": "192.0.2.1"}, "kv_ip is '192.0.2.1' and kv_port is 0: there is no place to listen"),
        (
            {"kv_connector_extra_config": {"folder": "x"}},
            "folder in kv_connector_extra_config is 'x': NearConnector has",
        ),
    ],
)
def test_settings_that_cannot_be(opened: Open, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened("kv_both", **config)
    near_library.OPEN.clear()


@pytest.mark.parametrize("kind", [NixlConnector, MooncakeConnector])
def test_what_the_package_offers(kind: type[network_connectors.NetworkConnector], monkeypatch: Any) -> None:
    """By the names of vLLM's connectors; without its library a connector says what to install."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP][kind.__name__] == f"{kind.__module__}:{kind.__name__}"
    assert kind.extra_name in project["optional-dependencies"]
    config = KVTransferConfig(kind.__name__, kv_connector_module_path=kind.__module__)
    for name in [kind.library, *(n for n in sys.modules if n.startswith(f"{kind.library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'graphllm\[{kind.extra_name}\]'"):
        find_connector(config)
    with pytest.raises(ConfigError, match="without a cache_secret"):
        kind.shared_secret(config)


@pytest.mark.parametrize(
    ("kind", "extra", "says"),
    [
        (NixlConnector, {"backends": "UCX"}, "backends in kv_connector_extra_config is 'UCX': give a list"),
        (NixlConnector, {"num_threads": True}, "num_threads in kv_connector_extra_config is True: give a number"),
        (
            MooncakeConnector,
            {"mooncake_protocol": ""},
            "mooncake_protocol in kv_connector_extra_config is '': give rdma",
        ),
        (MooncakeConnector, {"device_name": 3}, "device_name in kv_connector_extra_config is 3: give names of devices"),
    ],
)
def test_settings_of_libraries(kind: type[network_connectors.NetworkConnector], extra: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind.check(KVTransferConfig(kind.__name__, kv_connector_extra_config=extra))
