"""Tool calls that a stop string or token cuts: by every API they are half a call, and a whole one stays one."""

from __future__ import annotations

import json

import pytest

from graphllm.chat.answers import ChunkWriter, response_body
from graphllm.chat.call import CHAT, parse_call
from graphllm.chat.reading import Reading
from graphllm.chat.replies import ReplyFormat
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from graphllm.server.apis.anthropic.events import MessageWriter
from graphllm.server.apis.responses.events import ResponseWriter

WHOLE = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "b ', "stop"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1', "stop"),
        ("hermes", '<tool_call>{"arguments": {"a": 1, "name": "add', "stop"),  # no call has begun
        ("hermes", WHOLE + '<tool_call>{"name": "add", "arguments": {', "stop"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "tool_calls"),
        ("hermes", WHOLE, "tool_calls"),
        ("hermes", WHOLE + " And", "tool_calls"),
        ("llama3", '{"name": "add", "parameters": {"a": "b', "stop"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "b', "stop"),
        ("json", '[{"name": "add", "parameters": {"a": "b', "stop"),
        ("named", '{"a": "b', "stop"),
        ("named", '{"a": "b"}', "tool_calls"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stop", ["STOP", 7])
def test_a_stop_string_within_a_call(style: str, text: str, reason: str, stop: str | int) -> None:
    """Half a call is none that a client should make, whichever API it speaks; what there is of it is shown."""
    call = parse_call(CHAT, {"messages": [{"role": "user", "content": "x"}]}, SamplingParams())._replace(
        reply=ReplyFormat(tools=style, name="add", names=frozenset({"add"}))
    )
    completion = CompletionOutput(0, text, [5], finish_reason="stop", stop_reason=stop)
    output = RequestOutput("r", "x", [5], None, [completion], True, RequestMetrics(0.0))
    (choice,) = response_body(call, [output], "1", "m", 0)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    for made in choice["message"].get("tool_calls", ()):
        json.loads(made["function"]["arguments"])
    (chunk,) = [c for c in ChunkWriter(call, "1", "m", 0).write(0, output) if c["choices"][0]["finish_reason"]]
    assert chunk["choices"][0]["finish_reason"] == reason
    reading = Reading(call, len)
    parts = reading.read(output)
    message = MessageWriter("msg_1", "m")
    response = ResponseWriter("resp_1", 0, "m", {}, call.params)
    for writer in (message, response):
        writer.parts(parts)
        writer.end(reading.ending)
    ends = {"tool_calls": "tool_use", "stop": "stop_sequence" if stop == "STOP" else "end_turn"}
    assert message.body()["stop_reason"] == ends[reason]
    assert message.body()["stop_sequence"] == (stop if ends[reason] == "stop_sequence" else None)
    statuses = [item["status"] for item in response.body()["output"] if item["type"] == "function_call"]
    assert statuses[-1:] == (["completed"] if reason == "tool_calls" else ["incomplete"] if statuses else [])
