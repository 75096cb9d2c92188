"""`graphllm chat` against a scripted server: piped lines in this process, and a real terminal with its keys."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from graphllm.cli.chat import chat
from graphllm.config import ConfigError
from tests.server.fake_server import CARD, Reply, State, answer, chunk, error, serving, usage
from tests.waiting import PATIENCE, until


@pytest.fixture
def server() -> Iterator[State]:
    """A scripted server."""
    with serving() as state:
        yield state


@pytest.fixture
def talk(
    server: State, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """talk(*lines, **settings): pipe lines in; exit status, stdout, stderr."""

    def call(*lines: str, **settings: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        given: dict[str, Any] = {"url": server.url, "api_key": None, "system": None, "sampling": {}, "model": None}
        code = chat(**(given | settings))
        return code, *capsys.readouterr()

    return call


# --- Lines from a pipe


def test_each_line_is_a_turn(server: State, talk: Any) -> None:
    server.replies += [Reply(answer("One: *1*\tä", reasoning="Hm.")), Reply(answer("Two."))]
    assert talk("first", "", "  second  ") == (0, "One: *1*\tä\nTwo.\n", "")
    first, second = server.chats()
    assert first == {
        "model": CARD["id"], "messages": [{"role": "user", "content": "first"}], "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert second["messages"] == [
        {"role": "user", "content": "first"}, {"role": "assistant", "content": "One: *1*\tä"},
        {"role": "user", "content": "second"},
    ]  # fmt: skip


def test_settings_reach_the_server(server: State, talk: Any) -> None:
    server.replies.append(Reply(answer("Ok.")))
    server.models.append(CARD | {"id": "adapter"})
    talk("x", system="Be brief.", sampling={"temperature": 0.0, "seed": None, "stop": ["\n"]}, model="adapter")
    (body,) = server.chats()
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body.get(name, "absent") for name in ("model", "temperature", "seed", "stop")} == {
        "model": "adapter", "temperature": 0.0, "seed": "absent", "stop": ["\n"]
    }  # fmt: skip


def test_commands(server: State, talk: Any, tmp_path: Path) -> None:
    server.replies += [Reply(answer(text)) for text in ("A1", "A2", "B", "C", "D")]
    file = tmp_path / "said.json"
    code, out, err = talk(
        "a", "/retry", "/system Be kind.", "//b", f"/save {file}", "/new", "/system", "c", "/exit", "d"
    )
    assert (code, out, err) == (0, "A1\nA2\nB\nC\n", "")
    user, kind = {"role": "user", "content": "a"}, {"role": "system", "content": "Be kind."}
    said = [kind, user, {"role": "assistant", "content": "A2"}, {"role": "user", "content": "/b"}]
    assert [body["messages"] for body in server.chats()] == [[user], [user], said, [{"role": "user", "content": "c"}]]
    saved = json.loads(file.read_text())
    assert saved == {"model": CARD["id"], "messages": [*said, {"role": "assistant", "content": "B"}]}


def test_commands_that_cannot_be_done(server: State, talk: Any, tmp_path: Path) -> None:
    code, out, err = talk("/retry", f"/save {tmp_path}", "/nonsense x", "/help")
    assert code == 1
    assert "/save FILE" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["error"] * 3
    assert "/nonsense" in err.splitlines()[2]
    assert server.chats() == []


def test_errors_take_one_line_and_the_talk_goes_on(server: State, talk: Any) -> None:
    broken = {"error": {"message": "the engine\ndied", "type": "server_error"}}
    server.replies += [
        error("temperature is 3:\n give a number from 0 to 2", 400), Reply((), 502, b"<p>Bad gateway</p>"),
        Reply([chunk(content="Par"), broken]), Reply([chunk(content="Part")]), Reply(answer("Fine.")),
    ]  # fmt: skip
    code, out, err = talk("a", "b", "c", "d", "e")
    assert code == 1
    assert out == "Par\nPart\nFine.\n"
    assert err.splitlines() == [
        "error: temperature is 3: give a number from 0 to 2", "error: 502 Bad Gateway <p>Bad gateway</p>",
        "error: the engine died", "error: the connection ended before the answer did",
    ]  # fmt: skip
    questions = [m["content"] for m in server.chats()[-1]["messages"] if m["role"] == "user"]
    assert questions == ["c", "d", "e"]  # what got no answer is not told


def test_a_server_that_goes_away(server: State, talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first answer nothing listens any more."""

    def lines() -> Iterator[str]:
        yield "a\n"
        server.close()
        yield "b\n"

    server.replies.append(Reply(answer("A")))
    monkeypatch.setattr(sys, "stdin", type("Pipe", (), {"isatty": lambda _: False, "__iter__": lambda _: lines()})())
    assert chat(server.url, None, None, {}, None) == 1


# --- What cannot begin


def test_nothing_answers(talk: Any) -> None:
    with serving() as gone:
        pass
    with pytest.raises(ConfigError) as mistake:
        talk("x", url=gone.url)
    assert str(mistake.value) == f"url is '{gone.url}': nothing answers there; start `graphllm serve`"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://[::1", ""])
def test_addresses_that_are_none(talk: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^url is {re.escape(repr(url))}: .*give http://"):
        talk("x", url=url)


@pytest.mark.parametrize("url", ["http://host.invalid", "https{rest}", "{url}/elsewhere"])
def test_addresses_without_such_a_server(server: State, talk: Any, url: str) -> None:
    url = url.format(url=server.url, rest=server.url.removeprefix("http"))
    with pytest.raises(ConfigError, match=f"^url is '{url}': "):
        talk("x", url=url)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_below_a_prefix(talk: Any, ending: str) -> None:
    with serving("/some/where") as server:
        server.replies.append(Reply(answer("Here.")))
        assert talk("x", url=server.url + ending) == (0, "Here.\n", "")


def test_the_key(server: State, talk: Any) -> None:
    server.key = "s3cret"
    server.replies.append(Reply(answer("Welcome.")))
    for key, problem in [(None, "missing"), ("wr0ng", "refused")]:
        with pytest.raises(ConfigError, match=f"^api-key is {problem}") as mistake:
            talk("x", api_key=key)
        assert "wr0ng" not in str(mistake.value)
    assert talk("x", api_key="s3cret") == (0, "Welcome.\n", "")


def test_a_model_that_is_not_there(talk: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model is 'huge': the server has tiny-llama$"):
        talk("x", model="huge")


# --- At a terminal


class Terminal:
    """A process at a terminal of its own. end: our end of it."""

    def __init__(self, command: list[str]) -> None:
        self.end, inner = pty.openpty()
        # Makes it the controlling terminal; and a process in the background may have been told to ignore Ctrl-C.
        own = (
            "import os, signal; os.open(os.ttyname(0), os.O_RDWR); "
            f"signal.signal(signal.SIGINT, signal.default_int_handler); {command[-1]}"
        )
        self.process = subprocess.Popen(
            [*command[:-1], own], stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )  # fmt: skip
        os.close(inner)
        self.text = ""

    def until(self, text: str) -> str:
        """Read up to this text; what was read since the last time."""
        while text not in self.text:
            assert select.select([self.end], [], [], PATIENCE)[0], f"no {text!r} in {self.text!r}"
            self.text += os.read(self.end, 4096).decode()
        before, self.text = self.text.split(text, 1)
        return before + text

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.end, keys.encode())

    def leave(self, key: str) -> int:
        """Press a key until the process ends; its exit status. (A Ctrl-C in the moment between prompt and reading
        waits for the next key.)"""

        def ended() -> bool:
            with suppress(OSError):
                self.type(key)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            return self.process.poll() is not None

        until(ended, what=self.text)
        return self.process.returncode


@contextmanager
def _terminal(server: State) -> Iterator[Terminal]:
    call = f"from graphllm.cli.chat import chat; raise SystemExit(chat({server.url!r}, None, None, {{}}, None))"
    terminal = Terminal([sys.executable, "-c", call])
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.end)


def _plain(text: str) -> str:
    """Without escape sequences, and with the terminal's line ends undone."""
    return re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])", "", text).replace("\r", "")


def test_a_terminal(server: State) -> None:
    """Tokens as they come, thoughts and figures dim, hostile text harmless, history, Ctrl-D."""
    gate = threading.Event()
    thoughts = [chunk(reasoning_content="Let me"), chunk(reasoning_content=" see.")]
    end = [chunk(content=" is 42."), chunk("stop"), usage(1234, 5, 1024), b"[DONE]"]
    server.replies += [
        Reply([*thoughts, chunk(content="The answer"), gate, *end]), Reply(answer("\x1b]0;x\x07\x1b[31mred\r\n\x9b31m"))
    ]  # fmt: skip
    with _terminal(server) as terminal:
        assert "tiny-llama" in terminal.until("> ")
        asked = time.perf_counter()
        terminal.type("What is it?\r")
        assert "\x1b[2mLet me\x1b[0m\x1b[2m see.\x1b[0m\r\n" in terminal.until("The answer")
        shown = time.perf_counter()
        subprocess.run([sys.executable, "-c", ""], check=True)  # takes a while, in which nothing comes
        held = time.perf_counter() - shown
        gate.set()
        assert terminal.until(" is 42.") == " is 42."
        after = terminal.until("> ")
        figures = re.search(
            r"([\d.]+) tokens/s · first token \d+ ms · 1,234 in \(1,024 cached\) · 5 out\n", _plain(after)
        )
        assert figures is not None
        assert 0.9 * held <= (5 - 1) / float(figures[1]) <= 1.1 * (time.perf_counter() - asked)
        assert "\x1b[2m" in after
        terminal.type("\x1b[A\r")  # the line before
        shown = terminal.until(" out")
        assert "\x1b]0" not in shown
        assert "\x1b[31m" not in shown
        assert "\ufffd]0;x\ufffd\ufffd[31mred\r\n\ufffd31m" in shown
        terminal.until("> ")
        assert terminal.leave("\x04") == 0
    assert [body["messages"][-1]["content"] for body in server.chats()] == ["What is it?"] * 2


def _endless() -> Iterator[dict[str, Any]]:
    for i in itertools.count():
        time.sleep(0.005)
        yield chunk(content=f"{i} ")


@pytest.mark.parametrize("waiting", [False, True], ids=["while it writes", "before the first token"])
def test_control_c(server: State, waiting: bool) -> None:
    """It closes the connection; the conversation goes on; at the prompt it leaves."""
    script: list[Any] = [threading.Event()]
    server.replies += [Reply(script if waiting else _endless()), Reply(answer("Again."))]
    with _terminal(server) as terminal:
        terminal.until("> ")
        terminal.type("Count.\r")
        if waiting:
            until(server.chats)
        else:
            terminal.until("0 1 2 3")
        terminal.type("\x03")
        assert server.left.wait(PATIENCE)
        assert "stopped\n" in _plain(terminal.until("> "))
        terminal.type("And now?\r")
        terminal.until("Again.")
        terminal.until("> ")
        assert terminal.leave("\x03") == 0
    *before, now = server.chats()[1]["messages"]
    assert now == {"role": "user", "content": "And now?"}
    if waiting:
        assert before == []
    else:
        assert before[1]["content"].startswith("0 1 2 3 ")


def test_errors_at_a_terminal(server: State) -> None:
    server.replies += [error("the server is full", 429), Reply(answer("Fine."))]
    with _terminal(server) as terminal:
        terminal.until("> ")
        terminal.type("x\r")
        assert "error: the server is full" in _plain(terminal.until("> "))
        terminal.type("/retry\r")
        terminal.until("Fine.")
        assert terminal.leave("/quit\r") == 0


def test_it_needs_no_torch() -> None:
    """Starting it takes a moment, not seconds."""
    code = "import sys, graphllm.cli.chat; print([m for m in ('torch', 'fastapi', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
