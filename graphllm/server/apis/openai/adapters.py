"""vLLM's routes that load and unload adapters, for servers that were given a folder of them."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, Field

from graphllm.config import ConfigError
from graphllm.entrypoints.adapters import LoRARequest
from graphllm.server.http.document import errors
from graphllm.server.http.errors import NotFoundError
from graphllm.server.http.wire import JsonRoute
from graphllm.server.service.adapters import ServedAdapter, inside
from graphllm.server.service.service import Service

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadBody(BaseModel):
    """POST /v1/load_lora_adapter"""

    lora_name: str = Field(min_length=1, max_length=256, description="Requests give it as their model.")
    lora_path: str = Field(min_length=1, max_length=4096, description="Its folder, in the server's --lora-dir.")
    load_inplace: bool = Field(False, description="In the place of one of that name.")
    is_3d_lora_weight: bool | None = Field(None, description="Not used.")


class UnloadBody(BaseModel):
    """POST /v1/unload_lora_adapter"""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(None, description="Not used.")


def adapter_routes(service: Service, folder: str) -> APIRouter:
    """The routes, for adapters under a folder."""
    router = APIRouter(route_class=JsonRoute, tags=["Adapters"], responses=errors(400, 401, 404))

    @router.post(LOAD)
    async def load(body: LoadBody) -> Response:
        """Serve an adapter; its files are read and checked first, while requests run."""
        adapters = service.shared.adapters
        if body.lora_name in service.names:
            raise ConfigError(f"lora_name is {body.lora_name!r:.80}: the model itself has it; give another one")
        if not body.load_inplace and await adapters.find(body.lora_name) is not None:
            raise ConfigError(
                f"lora_name is {body.lora_name!r:.80}: it is served already; give another one, or load_inplace: true"
            )
        path = inside(folder, body.lora_path)
        await service.supervisor.engine.open_adapter(LoRARequest(body.lora_name, lora_path=path))
        await adapters.put(ServedAdapter(body.lora_name, path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(UNLOAD)
    async def unload(body: UnloadBody) -> Response:
        """Serve an adapter no more; requests that have it end as they would."""
        if not await service.shared.adapters.remove(body.lora_name):
            raise NotFoundError(
                f"lora_name is {body.lora_name!r:.80}: no adapter has it; see /v1/models", "model_not_found"
            )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
