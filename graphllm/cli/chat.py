"""`graphllm chat`: a conversation with a running server, at the terminal or line by line from a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from graphllm.config import ConfigError

HELP = """\
/new           begin a new conversation
/retry         ask the last question again
/system TEXT   set the system prompt; without TEXT, have none
/save FILE     write the conversation as JSON
/exit, /quit   leave; so does Ctrl-D
//TEXT         ask something that begins with a slash
Ctrl-C stops an answer, and at the prompt leaves."""
_CONNECT_SECONDS = 10.0
# A model's text must not steer the terminal.
_VISIBLE = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}, "\ufffd") | {ord("\r"): ""}


class ServerError(Exception):
    """The server refused, failed or was not there. Its text is one line for people. status: of HTTP; 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


class Server:
    """A server with the OpenAI API. Raises ConfigError for a url that cannot be one."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as mistake:
            raise ConfigError(f"url is {url!r:.80}: {mistake}; give http://HOST:PORT") from mistake
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"url is {url!r:.80}: give http://HOST:PORT or https://HOST:PORT")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """The names of what it serves. Raises ServerError."""
        with self._request("GET", "/v1/models") as response:
            text = response.read()
        try:
            return [str(card["id"]) for card in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError) as reason:
            raise ServerError("what answers there is no server of this kind") from reason

    def stream(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of a chat answer as they come. Closing the iterator closes the connection, which ends the
        server's work on it. Raises ServerError, also where the answer is cut off."""
        ended = False
        with self._request("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise ServerError(str(chunk["error"]["message"]))
                ended = ended or any(choice.get("finish_reason") for choice in chunk["choices"])
                yield chunk
        if not ended:
            raise ServerError("the connection ended before the answer did")

    @contextmanager
    def _request(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        with closing(self._connection(self._host, self._port, timeout=_CONNECT_SECONDS)) as connection:
            self._connect(connection)
            try:
                connection.request(method, self._prefix + path, body, self._headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        raise ServerError(_message(response), response.status)
                    yield response
            except (OSError, HTTPException) as reason:
                raise ServerError(f"the connection broke ({reason or type(reason).__name__})") from reason

    def _connect(self, connection: HTTPConnection) -> None:
        try:
            connection.connect()
        except ConnectionRefusedError as reason:
            raise ServerError(f"url is {self.url!r:.80}: nothing answers there; start `graphllm serve`") from reason
        except OSError as reason:
            raise ServerError(f"url is {self.url!r:.80}: it cannot be reached ({reason})") from reason
        connection.sock.settimeout(None)  # the first token may take long


def _message(response: HTTPResponse) -> str:
    """What a refusal says."""
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status} {response.reason} {text:.200}"


@dataclass
class Turn:
    """A question and what came of it. Times are clock readings in seconds; 0: not yet. usage: the server's figures."""

    question: str
    answer: str = ""
    pieces: int = 0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> list[str]:
        """Speed and size, for people; guessed from the pieces where the server's figures did not come."""
        about = "" if self.usage else "about "
        made = self.usage.get("completion_tokens", self.pieces)
        parts = []
        if made > 1 and self.last > self.first:
            parts.append(f"{about}{(made - 1) / (self.last - self.first):,.1f} tokens/s")
        if self.first:
            parts.append(f"first token {(self.first - self.sent) * 1000:,.0f} ms")
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            parts.append(f"{self.usage['prompt_tokens']:,} in" + (f" ({cached:,} cached)" if cached else ""))
        return [*parts, f"{about}{made:,} out"] if made else parts


@dataclass
class Conversation:
    """The turns so far and how they are shown: with figures and thoughts at a terminal, else only the answers."""

    server: Server
    model: str
    system: str | None
    sampling: dict[str, Any]
    console: Console
    errors: Console
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """The conversation in the API's form, without turns that came to nothing, except the last one's question."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            if turn.answer or turn is self.turns[-1]:
                said.append({"role": "user", "content": turn.question})
            if turn.answer:
                said.append({"role": "assistant", "content": turn.answer})
        return said

    def ask(self, question: str) -> bool:
        """Ask, and print the answer as it comes; whether it went well. Ctrl-C at a terminal ends the answer only."""
        turn = Turn(question)
        self.turns.append(turn)
        body = {"model": self.model, "messages": self.messages(), "stream": True} | self.sampling
        turn.sent = time.perf_counter()
        ending, well = "", True
        try:
            with closing(self.server.stream(body | {"stream_options": {"include_usage": True}})) as chunks:
                for chunk in chunks:
                    ending = self._show(turn, chunk) or ending
        except KeyboardInterrupt:
            if not self.console.is_terminal:
                raise
            ending = "stopped"
        except ServerError as reason:
            ending, well = str(reason), False
        if turn.pieces or ending == "stopped":  # the terminal has shown ^C
            self.console.out()
        if not well:
            self.complain(ending)
        elif self.console.is_terminal:
            notes = {"stopped": ["stopped"], "length": ["cut at the token limit"]}
            self.note(" · ".join(turn.figures() + notes.get(ending, [])))
        return well

    def _show(self, turn: Turn, chunk: Mapping[str, Any]) -> str | None:
        """Print a chunk and count it; the finish reason, when it has one."""
        turn.usage = chunk.get("usage") or turn.usage
        if not chunk["choices"]:
            return None
        delta = chunk["choices"][0]["delta"]
        text = delta.get("content") or ""
        thoughts = delta.get("reasoning_content") or delta.get("reasoning") or ""
        functions = [call["function"] for call in delta.get("tool_calls") or []]
        called = "".join(f"\n{f['name']} " if f.get("name") else f.get("arguments") or "" for f in functions)
        if text or thoughts or called:
            turn.last = time.perf_counter()
            turn.first = turn.first or turn.last
            turn.pieces += 1
        if self.console.is_terminal:
            self._dim(thoughts)
            if text and not turn.answer and turn.pieces > 1:
                self.console.out()  # below the thoughts
        turn.answer += text  # first, so that Ctrl-C leaves nothing on the screen that the next turn does not know
        self._write(text + called)
        return chunk["choices"][0].get("finish_reason")

    def retry(self) -> bool:
        """The last question again, without its answer."""
        if not self.turns:
            self.complain("there is no question to ask again")
            return False
        return self.ask(self.turns.pop().question)

    def save(self, file: str) -> bool:
        """Write model and messages as JSON."""
        try:
            Path(file).expanduser().write_text(
                json.dumps({"model": self.model, "messages": self.messages()}, ensure_ascii=False, indent=2) + "\n",
                encoding="utf-8",
            )
        except OSError as reason:
            self.complain(f"cannot write {file!r}: {reason.strerror or reason}")
            return False
        self.note(f"saved in {file}")
        return True

    def note(self, text: str) -> None:
        """A quiet line, at a terminal."""
        if self.console.is_terminal:
            self._dim(f"{text}\n")

    def complain(self, text: str) -> None:
        """One line on stderr."""
        self.errors.out(f"error: {text.translate(_VISIBLE)}", style="red", highlight=False)

    def _dim(self, text: str) -> None:
        self.console.out(text.translate(_VISIBLE), style="dim", highlight=False, end="")

    def _write(self, text: str) -> None:
        self.console.file.write(text.translate(_VISIBLE) if self.console.is_terminal else text)  # out() changes tabs
        self.console.file.flush()


def chat(url: str, api_key: str | None, system: str | None, sampling: Mapping[str, Any], model: str | None) -> int:
    """Talk until the input ends; the exit status: 1 when lines were piped in and one of them failed. sampling: fields
    of the request; None: the server's own. model: its name at the server; None: the first one there.
    Raises ConfigError when there is no such server or model, or the key is not its."""
    server = Server(url, api_key)
    name = _choose(server, api_key, model)
    given = {key: value for key, value in sampling.items() if value is not None}
    conversation = Conversation(server, name, system, given, Console(), Console(stderr=True))
    conversation.note(f"{name} at {url}; /help lists the commands")
    well = True
    for line in _lines():
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text:
            well = _obey(conversation, text) and well
    return 0 if well or sys.stdin.isatty() else 1


def _choose(server: Server, api_key: str | None, wanted: str | None) -> str:
    try:
        names = server.models()
    except ServerError as reason:
        if reason.status == 401:
            problem = "refused by the server" if api_key else "missing, and this server asks for one"
            raise ConfigError(f"api-key is {problem}: give its key with --api-key") from reason
        known = str(reason).startswith("url is ")
        raise ConfigError(str(reason) if known else f"url is {server.url!r:.80}: {reason}") from reason
    if not names:
        raise ConfigError(f"url is {server.url!r:.80}: no model is served there")
    if wanted is not None and wanted not in names:
        raise ConfigError(f"model is {wanted!r:.80}: the server has {', '.join(names)}")
    return wanted or names[0]


def _lines() -> Iterator[str]:
    """What is typed, with line editing and history, or piped in; until Ctrl-D, Ctrl-C or the end."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  input() uses it from now on

    prompt = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        yield line


def _obey(conversation: Conversation, text: str) -> bool:
    """Do what a line asks for; whether it went well."""
    if not text.startswith("/"):
        return conversation.ask(text)
    if text.startswith("//"):
        return conversation.ask(text[1:])
    command, _, rest = text.partition(" ")
    match command:
        case "/new":
            conversation.turns.clear()
            conversation.note("a new conversation")
        case "/system":
            conversation.system = rest.strip() or None
            conversation.note("the system prompt is set" if conversation.system else "there is no system prompt now")
        case "/retry":
            return conversation.retry()
        case "/save":
            return conversation.save(rest.strip())
        case "/help":
            conversation.console.out(HELP, highlight=False)
        case _:
            conversation.complain(f"there is no command {command!r:.80}: /help lists them")
            return False
    return True
