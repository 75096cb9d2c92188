"""What of vLLM's HTTP surface is here: the part of docs/compatibility.md about requests, routes, flags and metrics. It
is made from the models of bodies, the tables of other fields, the routes and the metric families themselves."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from graphllm.chat.fields import GUIDED, IGNORED, REFUSED
from graphllm.config.vllm.names import SAMPLING_NAMES
from graphllm.config.vllm.server_names import FRONTEND_NAMES
from graphllm.config.vllm.table import state, table
from graphllm.config.vllm.unserved import UNSERVED
from graphllm.engine.metrics.metric_families import FAMILIES, NOT_MEASURED
from graphllm.server.apis.anthropic import requests as anthropic
from graphllm.server.apis.anthropic.requests import MessagesRequest
from graphllm.server.apis.openai.protocol import ChatBody, CompletionBody
from graphllm.server.apis.responses.requests import ResponsesRequest

APIS: Mapping[str, type[BaseModel]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
_NEUTRAL_ONLY = {"messages": anthropic.NEUTRAL}
_HEAD = """
## HTTP

### Fields of requests

Of `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`. "ignored" means that the log says
so once, and that `--strict-fields` refuses it; a field that is refused is one with other values than those that ask
for nothing, and gets a 400 that names it. A field that stands nowhere is refused, too.
"""
_ROUTES = """
### Routes

`/docs` of a server lists the routes that are served. These routes are not:
"""
_FLAGS = """
### Flags of the server

Flags of vLLM's server besides the options of `graphllm serve --help` and the engine's above.
`--no-...` is the other value of a switch.
"""
_METRICS = """
### Metrics

`/metrics` has metrics under vLLM's names and under our own. These metrics of vLLM's are missing:
"""


def state_of(api: str, name: str) -> str:
    """What a field is to an API: works, ignored or refused."""
    if name in _NEUTRAL_ONLY.get(api, ()):
        return "refused"
    if name in APIS[api].model_fields:
        return "works"
    if name in GUIDED:
        return "works" if api in ("chat", "completions") else "refused"
    return "ignored" if name in IGNORED else "refused"


def _about(name: str) -> str:
    if name in GUIDED:
        return f"the older name of structured_outputs.{GUIDED[name]}"
    described = [model.model_fields[name].description for model in APIS.values() if name in model.model_fields]
    if described:
        return next(filter(None, described), "")
    if name in IGNORED:
        return IGNORED[name]
    return REFUSED[name].remedy if name in REFUSED else SAMPLING_NAMES[name].remedy


def _fields() -> list[tuple[str, ...]]:
    """A row for each field that anybody has judged."""
    names = {name for model in APIS.values() for name in model.model_fields} | {*GUIDED, *IGNORED, *REFUSED}
    names |= {name for name, entry in SAMPLING_NAMES.items() if entry.means is None}
    return [(f"`{name}`", *(state_of(api, name) for api in APIS), _about(name)) for name in sorted(names)]


def http_part() -> str:
    """The part about HTTP, in Markdown."""
    routes = [(f"`{path}`", f"refused: {why}") for path, why in sorted(UNSERVED.items())]
    flags = [(f"`--{name.replace('_', '-')}`", state(entry)) for name, entry in sorted(FRONTEND_NAMES.items())]
    metrics = [(f"`vllm:{name}`", why) for name, why in sorted(NOT_MEASURED.items())]
    here = ", ".join(f"`vllm:{family.alias}`" for family in FAMILIES if family.alias)
    parts = (
        (_HEAD, ("field", *APIS, ""), _fields()),
        (_ROUTES, ("route", "here"), routes),
        (_FLAGS, ("flag", "here"), flags),
        (_METRICS, ("metric", "why"), metrics),
    )
    tables = (f"{words}\n{table(head, rows)}\n" for words, head, rows in parts)
    return "".join(tables) + f"\nThose that are: {here}.\n"
