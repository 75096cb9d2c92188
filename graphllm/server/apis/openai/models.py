"""OpenAI's routes of what a server has: its models and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from graphllm.server.apis.openai.protocol import ModelCard, ModelList
from graphllm.server.http.document import errors
from graphllm.server.http.errors import NotFoundError
from graphllm.server.service.service import Service


def model_routes(services: Sequence[Service]) -> APIRouter:
    """The routes, for the services of all models."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", responses=errors(401))
    async def models() -> ModelList:
        """The names under which models and adapters are served."""
        return ModelList(data=[card(service, name) for service in services for name in await names(service)])

    @router.get("/v1/models/{name:path}", responses=errors(401, 404))
    async def model(name: str) -> ModelCard:
        """One of them."""
        for service in services:
            if name in service.names or await service.shared.adapters.find(name) is not None:
                return card(service, name)
        raise NotFoundError(f"model is {name!r:.80}: not served here", "model_not_found")

    async def names(service: Service) -> list[str]:
        return [*service.names, *(adapter.name for adapter in await service.shared.adapters.all())]

    def card(service: Service, name: str) -> ModelCard:
        supervisor = service.supervisor
        ready = supervisor.engine.ready if supervisor.ready else None
        length = ready.info.max_model_len if ready else None
        parent = None if name in service.names else service.names[0]
        return ModelCard(id=name, created=service.created, root=service.names[0], parent=parent, max_model_len=length)

    return router
