"""Every way from a conversation to its prompt: over HTTP by each API, in a batch file, and `LLM.chat`. Of the server
only the engine is not there: what stands for it notes the prompts that it gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from graphllm.chat.call import CHAT, CHAT_BATCH, Call, Style, write_out
from graphllm.cli.run.batch import BatchItem, PlainItem
from graphllm.config import ConfigError, SchedulerConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.server import AccessConfig, ServerConfig
from graphllm.engine.process.messages import Ready
from graphllm.engine.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.llm import LLM
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.server.app import create_app
from graphllm.server.process.single_process import OwnOverview, in_memory
from graphllm.server.service.generation import Running
from graphllm.server.service.service import Service
from graphllm.server.service.stored_responses import ResponseStore
from graphllm.server.supervision.engine_view import EngineView
from graphllm.server.supervision.metrics import Metrics
from tests.engine.stub_core import StubCore, info

Chat = list[dict[str, Any]]
OPEN = SamplingParams(max_tokens=None)


class NotingEngine:
    """An engine that answers at once. prompts: the texts that it was asked with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ready = Ready(info(tokenizer.vocab_size, max_model_len=1 << 16, capacity=1 << 16), {})
        self.prompts: list[str] = []
        self.unfinished = 0
        self._tokenizer = tokenizer

    async def tokenized(self, prompt: Any) -> Any:
        return prompt

    async def token_ids(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    async def generate(
        self, prompt: Any, params: SamplingParams, id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.prompts.append(prompt["prompt"])
        completion = CompletionOutput(0, "ok", [5], finish_reason="stop")
        yield RequestOutput(id, prompt["prompt"], [5], None, [completion], True, RequestMetrics(0.0, 1.0, 1.0))


class WritingLLM(LLM):
    """Gives back what it would run."""

    def generate(self, prompts: Any, *_: Any, **__: Any) -> Any:
        return prompts


class Ways:
    """Each is given a conversation, tools in OpenAI's form or none, and how it ends: "begin" for a new message of the
    assistant, "plain" for nothing, "continue" for the last message. It returns the prompt; None when it was refused.
    An answer with another status than 200 and 400 is a failure."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._style = tokenizer, Style("hermes", False)
        self._engine = NotingEngine(tokenizer)
        opened = ResolvedModel(cast(Any, SimpleNamespace(scheduler=SchedulerConfig())), tokenizer, OPEN, [], "m")
        view = EngineView(
            status="ready", opened=opened, style=self._style, defaults=OPEN, _engine=cast(Any, self._engine)
        )
        metrics, running = Metrics("m"), Running()
        shared = in_memory(OwnOverview(view, metrics, running), ServerConfig(), ResponseStore())
        service = Service(view, ("m",), metrics, shared, running=running)
        self._app = create_app([service], metrics, AccessConfig(disable_fastapi_docs=True))
        self._loop = asyncio.new_event_loop()
        core = StubCore(info(tokenizer.vocab_size), np.zeros((1, 1, 1)))
        self._llm = WritingLLM.from_core(cast(Any, core), tokenizer, OPEN)

    def close(self) -> None:
        self._loop.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and answer."""
        data = json.dumps(body).encode()
        status, pieces = 0, []
        sent = False

        async def receive() -> Any:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # the client stays
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append(message.get("body", b""))

        headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("x", 1),
            "server": ("x", 1), "asgi": {"version": "3.0"},
        }  # fmt: skip
        self._loop.run_until_complete(self._app(scope, receive, send))
        assert status in (200, 400), (path, body, status, b"".join(pieces))
        return status, json.loads(b"".join(pieces))

    def asked(self, path: str, body: Any) -> str | None:
        """The prompt that an engine gets by this request."""
        self._engine.prompts.clear()
        status, _ = self.post(path, body)
        if status != 200:
            assert self._engine.prompts == []
            return None
        assert len(set(self._engine.prompts)) == 1
        return self._engine.prompts[0]

    def tokens(self, prompt: str | None) -> list[int] | None:
        """Of a prompt, as the tokenizer has them."""
        return None if prompt is None else self.tokenizer.encode(prompt, add_special_tokens=False)

    # --- ways of OpenAI's chat

    def chat(self, messages: Chat, tools: Any, end: str) -> str | None:
        return self.asked(CHAT, {"messages": messages, **_fields(tools, end)})

    def chat_batch(self, messages: Chat, tools: Any, end: str) -> str | None:
        return self.asked(CHAT_BATCH, {"messages": [messages, messages], **_fields(None, end)})

    def tokenize(self, messages: Chat, tools: Any, end: str) -> list[int] | None:
        status, answer = self.post("/tokenize", {"messages": messages, **_fields(tools, end)})
        return answer["tokens"] if status == 200 else None

    def batch_file(self, messages: Chat, tools: Any, end: str) -> str | None:
        return self._written(BatchItem("a", "POST", CHAT, {"messages": messages, **_fields(tools, end)}).call)

    def plain_line(self, messages: Chat, tools: Any, end: str) -> str | None:
        return self._written(PlainItem("a", None, messages, tools, {}).call)

    def llm(self, messages: Chat, tools: Any, end: str) -> str | None:
        try:
            (found,) = self._llm.chat(
                messages, tools=tools, add_generation_prompt=end == "begin", continue_final_message=end == "continue"
            )
        except ConfigError:
            return None
        return cast(Any, found)["prompt"]

    def _written(self, make: Callable[[SamplingParams], Call]) -> str | None:
        try:
            _, (found,) = write_out(make(OPEN), self.tokenizer, self._style)
        except ConfigError:
            return None
        return cast(Any, found)["prompt"]

    # --- other APIs

    def responses(self, items: Chat, tools: Any) -> str | None:
        given = [{"type": "function", **tool["function"]} for tool in tools or ()]
        return self.asked("/v1/responses", {"input": items, "store": False, **({"tools": given} if given else {})})

    def messages(self, turns: Chat, tools: Any) -> str | None:
        return self.asked("/v1/messages", {"max_tokens": 1, **_anthropic(turns, tools)})

    def count(self, turns: Chat, tools: Any) -> int | None:
        status, answer = self.post("/v1/messages/count_tokens", _anthropic(turns, tools))
        return answer["input_tokens"] if status == 200 else None


def _fields(tools: Any, end: str) -> dict[str, Any]:
    fields = {"begin": {}, "plain": {"add_generation_prompt": False}, "continue": {"continue_final_message": True}}
    return {**({"tools": tools} if tools else {}), **fields[end]}


def _anthropic(turns: Chat, tools: Any) -> dict[str, Any]:
    given = []
    for tool in tools or ():
        function = {name: value for name, value in tool["function"].items() if value is not None}
        given.append({**function, "input_schema": function.pop("parameters", {})})
        given[-1].pop("parameters", None)
    return {"messages": turns, **({"tools": given} if given else {})}


def as_items(messages: Chat) -> Chat | None:
    """A conversation as items of the Responses API; None for one that it cannot express: what the assistant says in a
    row is one message there, and nobody has a name."""
    items: Chat = []
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if "name" in message or (role == "assistant" and i and messages[i - 1]["role"] == "assistant"):
            return None
        kind = "output_text" if role == "assistant" else "input_text"
        parts = content if isinstance(content, str) else [{**part, "type": kind} for part in content]
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": parts})
            continue
        if thought := message.get("reasoning_content"):
            items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        calls = message.get("tool_calls") or []
        if parts or not calls:
            items.append({"role": role, "content": parts})
        for call in calls:
            function = call["function"]
            given = function["arguments"]
            text = given if isinstance(given, str) else json.dumps(given)
            items.append({"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": text})
    return items


def as_turns(messages: Chat, end: str) -> Chat | None:
    """A conversation as turns of Anthropic's API; None for one that it cannot express: neighbours of a role are one
    turn there, results of tools come first in a turn of the user's, and a last turn of the assistant's goes on."""
    turns: Chat = []
    before = ""
    for message in messages:
        role = {"developer": "system"}.get(message["role"], message["role"])
        if "name" in message or role == before != "tool" or (role, before) == ("tool", "user"):
            return None
        before = role
        content = message.get("content") or ""
        blocks: Chat = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if thought := message.get("reasoning_content"):
            blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": ""})
        for call in message.get("tool_calls") or []:
            given = call["function"]["arguments"] or "{}"
            try:
                given = json.loads(given) if isinstance(given, str) else given
            except ValueError:
                return None
            if not isinstance(given, dict):
                return None
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
        if role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}]
        turn = "user" if role == "tool" else role
        if turns and turns[-1]["role"] == turn:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": turn, "content": blocks})
    last = messages[-1]
    text = last.get("content") or ""
    goes_on = last["role"] == "assistant" and any(text if isinstance(text, str) else [p["text"] for p in text])
    if last["role"] == "assistant" and last.get("tool_calls"):
        return None
    return turns if goes_on == (end == "continue") and end != "plain" else None
