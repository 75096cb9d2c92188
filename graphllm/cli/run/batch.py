"""What `graphllm run` reads: plain prompts or requests of an OpenAI batch file, and the result line of each."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from graphllm.chat import answers, logprobs
from graphllm.chat.call import Call, parse_call
from graphllm.chat.error_bodies import error_body
from graphllm.chat.reading import failure, usage_of
from graphllm.cli.run.inputs import Inputs
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.chat_template.conversation import conversation, shown_tools
from graphllm.engine.requests.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 256  # of a plain prompt
_LINE_FIELDS = frozenset({"id", "custom_id", "prompt", "messages", "tools", "priority", "cache_salt", "model"})
_BATCH_FIELDS = frozenset({"url", "body", "method"})


@dataclass(frozen=True)
class PlainItem:
    """One prompt: text, or chat messages, or both: then the text is for a model without a chat template.

    fields: sampling fields of its own.
    model: an adapter's name, "" for none.
    """

    id: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    fields: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None
    model: str = ""

    def call(self, defaults: SamplingParams, chats: bool = True) -> Call:
        """What it asks for. chats: the model has a chat template. Raises ConfigError for fields that cannot be used."""
        params = SamplingParams.from_fields(self.fields, defaults)
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
        chat = self.messages is not None and (chats or self.prompt is None)
        prompts = [] if chat or self.prompt is None else [self.prompt]
        template = {"tools": tools} if (tools := shown_tools(self.tools)) else {}
        return Call(
            chat,
            params,
            prompts=prompts,
            messages=conversation(self.messages) if chat and self.messages is not None else [],
            template=template,
            priority=self.priority,
            cache_salt=self.cache_salt,
            model=self.model,
        )

    def row(self, call: Call, outputs: Sequence[RequestOutput], model: str) -> dict[str, Any]:
        """Its line in the results; several completions are in ``choices``."""
        (output,) = outputs
        choices = []
        for c in output.outputs:
            choice: dict[str, Any] = {"text": c.text, "finish_reason": c.finish_reason}
            if c.logprobs is not None:
                choice["logprobs"] = logprobs.entries(c.logprobs, call.params.logprobs or 0)
            if c.error is not None:
                choice["error"] = c.error
            choices.append(choice)
        row = {"id": self.id, **(choices[0] if len(choices) == 1 else {"choices": choices})}
        if output.prompt_logprobs is not None:
            row["prompt_logprobs"] = answers.prompt_logprobs(output.prompt_logprobs)
        return row | {"usage": answers.usage_body(usage_of(call, output))}

    def refused(self, mistake: ConfigError) -> dict[str, Any]:
        """Its line when it cannot run."""
        return {"id": self.id, "error": str(mistake)}


@dataclass(frozen=True)
class BatchItem:
    """One request of an OpenAI batch file, as it stands there. id: its custom_id."""

    id: str
    method: object
    url: object
    body: object

    def call(self, defaults: SamplingParams, chats: bool = True) -> Call:
        """What it asks for. chats: see `PlainItem.call`. Raises ConfigError for a request that cannot be used."""
        if self.method != "POST":
            raise ConfigError(f"method is {self.method!r:.80}: give POST")
        call = parse_call(self.url, self.body, defaults)
        if call.stream:
            raise ConfigError("stream is True: a batch has whole answers; leave it out")
        if call.beams is not None:
            raise ConfigError("use_beam_search is True: not in a batch; leave it out, or call LLM.beam_search")
        return call

    def row(self, call: Call, outputs: Sequence[RequestOutput], model: str) -> dict[str, Any]:
        """Its line in the results."""
        if (broken := failure(outputs)) is not None:
            if broken.mistake:
                return self.refused(ConfigError(broken.message))
            return self._row(500, error_body(broken.message, type="server_error"))
        return self._row(200, answers.response_body(call, outputs, uuid.uuid4().hex, model, int(time.time())))

    def refused(self, mistake: ConfigError) -> dict[str, Any]:
        """Its line when it cannot run."""
        return self._row(400, error_body(str(mistake), self.body))

    def _row(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        number = uuid.uuid4().hex
        response = {"status_code": status, "request_id": number, "body": body}
        return {"id": f"batch_req_{number}", "custom_id": self.id, "response": response, "error": None}


Item = PlainItem | BatchItem


def digest_of(item: Item, settings: str) -> str:
    """A digest of what the answer to an item follows from: all it says but its id and what only scheduling reads.
    settings: what it does not say itself."""
    if isinstance(item, PlainItem):
        content: list[object] = [None if item.messages else item.prompt, item.messages, item.tools, item.fields]
        content += [item.model] if item.model else []
    else:
        content = [item.method, item.url, item.body]
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()[:16]


class Items:
    """All that is to run, in order; may be gone through several times. A file is read anew each time, a line at once;
    what can be read only once, such as stdin, is kept. read: makes the item of a line of JSON. Raises ConfigError
    naming file and line for a line that cannot be used, also when two have the same id."""

    def __init__(self, inputs: Inputs, read: Callable[[str, str, Inputs], Item] | None = None) -> None:
        self._inputs, self._kept = inputs, None
        self._read = read or _json_item
        if inputs.file is not None and (inputs.file == "-" or not Path(inputs.file).is_file()):
            self._kept = _read(inputs.file)

    def __iter__(self) -> Iterator[Item]:
        for i, text in enumerate(self._inputs.prompts):
            yield _text_item(f"prompt-{i}", text, self._inputs)
        file = self._inputs.file
        if file is None:
            return
        name, as_json = ("stdin", None) if file == "-" else (file, file.endswith(".jsonl"))
        seen: set[str] = set()
        for number, line in enumerate(self._lines(file), 1):
            if not line.strip():
                continue
            if as_json is None:
                as_json = line.lstrip().startswith("{")
            where = f"{name}:{number}"
            item = (
                self._read(line, where, self._inputs) if as_json else _text_item(f"line-{number}", line, self._inputs)
            )
            if item.id in seen:
                raise ConfigError(f"{where}: id {item.id!r} appears twice; ids must be unique")
            seen.add(item.id)
            yield item

    def _lines(self, file: str) -> Iterator[str]:
        if self._kept is not None:
            yield from self._kept.split("\n")  # splitlines would also cut at U+2028, which JSON may hold
            return
        with _open(file) as lines:
            try:
                for line in lines:
                    yield line.rstrip("\r\n")
            except UnicodeDecodeError as damage:
                raise ConfigError(f"file: cannot read {file!r}: {damage}") from damage


def _read(file: str) -> str:
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as pipe:
            return pipe.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as damage:
        raise ConfigError(f"file: cannot read {file!r}: {damage}") from damage


def _open(file: str) -> IO[str]:
    try:
        return open(file, encoding="utf-8-sig", newline="\n")
    except OSError as reason:
        raise ConfigError(f"file: cannot read {file!r}: {reason}") from reason


def _text_item(id: str, text: str, inputs: Inputs) -> PlainItem:
    if inputs.raw:
        return PlainItem(id, text, None, None, {})
    return PlainItem(id, None if inputs.system else text, _chat(text, inputs.system), None, {})


def _chat(text: str, system: str | None) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _json_item(line: str, where: str, inputs: Inputs) -> Item:
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON and no text
    except (ValueError, RecursionError) as damage:
        raise ConfigError(f"{where}: not valid JSON ({damage})") from damage
    if isinstance(row, dict) and _BATCH_FIELDS & row.keys():
        id = row.get("custom_id")
        if not isinstance(id, str) or not id:
            raise ConfigError(f"{where}: custom_id is {id!r:.80}; a batch request needs one of its own, give a string")
        return BatchItem(id, row.get("method"), row.get("url"), row.get("body"))
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f"{where}: give an object with either prompt (text) or messages (a chat)")
    id = str(row.get("id", row.get("custom_id", where.rsplit(":", 1)[-1])))
    for name in ("messages", "tools"):
        if name in row and not _is_objects(row[name]) and (name, row[name]) != ("tools", None):
            raise ConfigError(f"{where}: {name} must be a list of objects")
    for name, kind, remedy in (
        ("priority", int, "a whole number"),
        ("cache_salt", str, "a string"),
        ("model", str, "a string"),
    ):
        if row.get(name) is not None and type(row[name]) is not kind:
            raise ConfigError(f"{where}: {name} is {row[name]!r:.80}, give {remedy}")
    if "messages" in row:
        prompt, messages = None, row["messages"]
    elif isinstance(row["prompt"], str):
        item = _text_item(id, row["prompt"], inputs)
        prompt, messages = item.prompt, item.messages
    else:
        raise ConfigError(f"{where}: prompt is {type(row['prompt']).__name__}, give a string")
    fields = {k: v for k, v in row.items() if k not in _LINE_FIELDS}
    tools, priority, salt = row.get("tools"), row.get("priority") or 0, row.get("cache_salt")
    return PlainItem(id, prompt, messages, tools, fields, priority, salt, row.get("model") or "")


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
