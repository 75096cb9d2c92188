"""Routes of models that give vectors, in the forms of OpenAI's, vLLM's, Cohere's and Jina's APIs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphllm.chat.call import checked_id
from graphllm.chat.fields import judged
from graphllm.config import ConfigError
from graphllm.config.errors import ErrorPlace
from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.server.apis.pooling import protocol
from graphllm.server.apis.pooling.running import Found, find_vectors, instructed, pooling_of
from graphllm.server.apis.pooling.writing import Order, base64_of, bits, bytes_of, numbers
from graphllm.server.http.document import GENERATES, answers, errors
from graphllm.server.http.wire import JsonRoute, Record, encode, json_response, record_of
from graphllm.server.service.service import Service

_PARAMS = (
    "truncate_prompt_tokens", "use_activation", "normalize", "activation", "softmax", "dimensions", "step_tag_id",
    "returned_token_ids",
)  # fmt: skip
_SCORES, _RANKS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")
VECTORS = ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", *_SCORES, *_RANKS)  # what these routes are
_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
_ORDERS: Mapping[str, Order] = {"native": "=", "little": "<", "big": ">"}
_PROMPTS_OF = {"search_query": "query", "search_document": "document"}  # Cohere's input_type, sentence-transformers'


def pooling_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(route_class=JsonRoute, tags=["Pooling"], responses=errors(*GENERATES))
    _add_vectors(router, service)
    _add_scores(router, service)
    _add_cohere(router, service)
    return router


def _add_vectors(router: APIRouter, service: Service) -> None:
    """Embeddings, classes, and vectors of every kind, one for each text."""

    @router.post("/v1/embeddings", tags=["OpenAI"], responses=answers(protocol.EmbeddingList))
    async def embeddings(body: protocol.EmbeddingBody, request: Request) -> Response:
        """The embedding of each text."""
        given = await _given(service, request, protocol.EmbeddingBody)
        found = await _run(service, request, given, (await pooling_of(service)).task("embed", "/v1/embeddings"))
        return _written(service, request, given, "embd", found, "embedding")

    @router.post("/pooling", responses=answers(protocol.PoolingList))
    async def pool(body: protocol.PoolingBody, request: Request) -> Response:
        """What the model gives for each text: its embedding, its classes, or a vector for each token."""
        given = await _given(service, request, protocol.PoolingBody)
        found = await _run(service, request, given, (await pooling_of(service)).task(given.pop("task", None)))
        return _written(service, request, given, "pool", found, "data")

    @router.post("/classify", responses=answers(protocol.ClassesList))
    async def classify(body: protocol.ClassifyBody, request: Request) -> Response:
        """The probabilities of the classes of each text."""
        given = await _given(service, request, protocol.ClassifyBody)
        pooling = await pooling_of(service)
        found = await _run(service, request, given, pooling.task("classify", "/classify"))
        labels = pooling.vectors.labels
        data = []
        for i, vector in enumerate(found.vectors):
            best = int(vector.argmax())
            label = labels[best] if best < len(labels) else None
            data.append({"index": i, "label": label, "probs": vector.tolist(), "num_classes": len(vector)})
        return json_response(_list(service, request, "classify", data, found))


def _add_scores(router: APIRouter, service: Service) -> None:
    """Scores of pairs of texts, and documents in the order of their scores."""

    async def score(body: protocol.ScoreBody, request: Request) -> Response:
        """How well texts go together."""
        given = await _given(service, request, protocol.ScoreBody)
        names = next((pair for pair in _PAIRS if all(name in given for name in pair)), None)
        if names is None:
            raise ConfigError("text_1 is missing: give text_1 and text_2, or queries and documents")
        first, second = (t if isinstance(t, list) else [t] for t in (given.pop(name) for name in names))
        scores, found = await _scores(service, request, first, second, names, given)
        data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
        return json_response(_list(service, request, "score", data, found))

    async def rerank(body: protocol.RerankBody, request: Request) -> Response:
        """Documents by how well they answer a query, best first."""
        given = await _given(service, request, protocol.RerankBody)
        documents = [_text(document, i) for i, document in enumerate(given.pop("documents"))]
        query, top, shown = given.pop("query"), given.pop("top_n", 0), given.pop("return_documents", True)
        if (most := given.pop("max_tokens_per_doc", None)) is not None:
            given.setdefault("truncate_prompt_tokens", min(most, service.info.max_model_len))
        if given.pop("truncation", False):
            given.setdefault("truncate_prompt_tokens", -1)
        scores, found = await _scores(service, request, [query], documents, ("query", "documents"), given)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: top or None]
        results = [
            {"index": i, "relevance_score": scores[i]} | ({"document": {"text": documents[i]}} if shown else {})
            for i in order
        ]
        head = _list(service, request, "rerank", [], found)
        return json_response(
            {"id": head["id"], "model": head["model"], "usage": head["usage"], "results": results,
             "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}}
        )  # fmt: skip

    for path in _SCORES:
        router.add_api_route(path, score, methods=["POST"], responses=answers(protocol.ScoreList))
    for path in _RANKS:
        router.add_api_route(path, rerank, methods=["POST"], responses=answers(protocol.RerankList))


def _add_cohere(router: APIRouter, service: Service) -> None:
    """Embeddings as Cohere's API gives them."""

    @router.post("/v2/embed", tags=["Cohere"], responses=answers(protocol.CohereEmbeddings))
    async def cohere_embed(body: protocol.CohereEmbedBody, request: Request) -> Response:
        """The embedding of each text, in one or several forms."""
        given = await _given(service, request, protocol.CohereEmbedBody)
        pooling = await pooling_of(service)
        task = pooling.task("embed", "/v2/embed")
        texts, kinds = given["texts"], given.get("embedding_types") or ["float"]
        name = given.get("input_type")
        name = next((n for n in (name, _PROMPTS_OF.get(str(name))) if n in pooling.vectors.checkpoint.prompts), None)
        side = given.get("truncate", "END")
        most = given.get("max_tokens") or (None if side == "NONE" else -1)
        if side == "START" and most is not None:
            raise ConfigError("truncate is 'START': texts are cut at their end; give END or NONE")
        params = PoolingParams(dimensions=given.get("output_dimension"), truncate_prompt_tokens=most)
        prompts = [pooling.instructed(text, name, params) for text in texts]
        places = [ErrorPlace("texts", i) for i in range(len(texts))]
        found = await find_vectors(service, request, prompts, places, params, task, given.get("priority", 0))
        forms: dict[str, Callable[[np.ndarray], Any]] = {
            "float": numbers, "base64": base64_of, "binary": lambda v: bits(v, signed=True), "ubinary": bits,
        }  # fmt: skip
        made = {kind: [forms[kind](v) for v in found.vectors] for kind in dict.fromkeys(kinds)}
        head = _list(service, request, "embd", [], found)
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": found.tokens}}
        return json_response(
            {"id": head["id"], "embeddings": made, "texts": texts, "meta": meta, "response_type": "embeddings_by_type"}
        )


async def _given(service: Service, request: Request, kind: type[protocol.Object]) -> dict[str, Any]:
    """The fields of a body that say something. Raises ConfigError for one that there is not."""
    record = record_of(request.scope)
    given = judged(record.body, kind.model_fields, service.chat.strict_fields)
    if unknown := next((name for name in given if name not in kind.model_fields), None):
        raise ConfigError(f"{unknown:.80} is {given[unknown]!r:.80}: not supported; leave it out")
    name = given.pop("model", None)
    if await service.adapter(name) is not None:
        raise ConfigError(f"model is {name!r:.80}: vectors here are the model's own; give {service.names[0]!r:.80}")
    if (name := checked_id(given.pop("request_id", None) or "")) and not record.named:
        record.id = name
    return given


def _params(given: Mapping[str, Any]) -> PoolingParams:
    return PoolingParams(**{name: given[name] for name in _PARAMS if name in given})


async def _run(service: Service, request: Request, given: Mapping[str, Any], task: str) -> Found:
    """The vectors of a body's prompts."""
    pooling, params = await pooling_of(service), _params(given)
    prompts = [
        pooling.instructed(prompt, given.get("prompt_name"), params)
        for prompt in await _prompts(service, record_of(request.scope), given)
    ]
    field = "messages" if "messages" in given else "input"
    places = [ErrorPlace(field, i if len(prompts) > 1 else None) for i in range(len(prompts))]
    return await find_vectors(
        service, request, prompts, places, params, task, given.get("priority", 0), given.get("cache_salt")
    )


async def _prompts(service: Service, record: Record, given: Mapping[str, Any]) -> list[Any]:
    """The prompts of ``input``, or the one of ``messages``."""
    if ("input" in given) == ("messages" in given):
        raise ConfigError("input is missing: give it" if "input" not in given else "messages: give input or messages")
    special = given.get("add_special_tokens", "messages" not in given)
    if "messages" in given:
        text = await service.conversation(record, {"messages": given["messages"], "add_generation_prompt": False})
        return [{"prompt": text, "add_special_tokens": special}]
    found = given["input"]
    if isinstance(found, str) or (found and isinstance(found[0], int)):
        found = [found]
    if not found:
        raise ConfigError("input is []: give at least one text")
    return [
        {"prompt": p, "add_special_tokens": special} if isinstance(p, str) else {"prompt_token_ids": p} for p in found
    ]


async def _scores(
    service: Service,
    request: Request,
    first: Sequence[str],
    second: Sequence[str],
    fields: tuple[str, str],
    given: Mapping[str, Any],
) -> tuple[list[float], Found]:
    pooling, params = await pooling_of(service), _params(given)
    scoring = pooling.scoring(first, second, fields)
    prompts = instructed(pooling, scoring.prompts, params)
    found = await find_vectors(
        service, request, prompts, scoring.places, params, "score", given.get("priority", 0), given.get("cache_salt")
    )
    return scoring.scores(found.vectors), found


def _text(document: Any, index: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise ConfigError(f"documents[{index}] is {document!r:.80}: give text, or an object with text")
    return text


def _written(
    service: Service, request: Request, given: Mapping[str, Any], kind: str, found: Found, key: str
) -> Response:
    """An answer with all vectors in the form that a body asks for. kind: the beginning of its id.
    key: of the numbers in each entry. As bytes the body is the numbers, vector after vector, and the header metadata
    has the rest."""
    form, dtype = given.get("encoding_format", "float"), given.get("embed_dtype", "float32")
    endianness = given.get("endianness", "native")
    order = _ORDERS[endianness]
    name = {"embd": "embedding", "pool": "pooling"}[kind]
    if form in ("float", "base64"):
        write = numbers if form == "float" else lambda vector: base64_of(vector, dtype, order)
        data = [{"index": i, "object": name, key: write(v)} for i, v in enumerate(found.vectors)]
        return json_response(_list(service, request, kind, data, found))
    pieces = [bytes_of(vector, dtype, order) for vector in found.vectors]
    data, begin = [], 0
    for i, (piece, vector) in enumerate(zip(pieces, found.vectors, strict=True)):
        place: dict[str, Any] = {"start": begin, "end": begin + len(piece), "shape": list(vector.shape)}
        data.append({"index": i, "embed_dtype": dtype, "endianness": endianness, **place})
        begin += len(piece)
    headers = {"metadata": encode(_list(service, request, kind, data, found)).decode()} if form == "bytes" else {}
    return Response(b"".join(pieces), media_type="application/octet-stream", headers=headers)


def _list(service: Service, request: Request, kind: str, data: list[Any], found: Found) -> dict[str, Any]:
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens, "completion_tokens": 0}
    return {
        "id": f"{kind}-{record_of(request.scope).id}", "object": "list", "created": int(time.time()),
        "model": service.names[0], "data": data, "usage": usage,
    }  # fmt: skip
