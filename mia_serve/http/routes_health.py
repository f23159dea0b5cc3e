"""Whether the server lives, whether it is ready, and what it counts."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from mia_serve.http.errors import HttpError, problems, retry_after
from mia_serve.http.keys import require
from mia_serve.http.services import Services, get_services

router = APIRouter(tags=["operation"])


class Health(BaseModel):
    """What the probe found."""

    status: Literal["ok"] = Field(description="The encoders have just encoded a text.")


class Ready(BaseModel):
    """Whether requests are served."""

    status: Literal["ready"]


@router.get("/health", response_model=Health, summary="Probe the encoders", responses=problems(503))
async def health(services: Annotated[Services, Depends(get_services)]) -> Health:
    """Encode a short text with every encoder; 503 where one does not answer. Needs no key."""
    trouble = await services.probe()
    if trouble is not None:
        raise HttpError(503, trouble, "unhealthy", headers=retry_after(2))
    return Health(status="ok")


@router.get("/ready", response_model=Ready, summary="Ask whether requests are served", responses=problems(503))
async def ready(services: Annotated[Services, Depends(get_services)]) -> Ready:
    """Say whether collections are recovered and encoders warm, and the server is not about to stop. Needs no key."""
    if services.trouble is not None:
        raise HttpError(503, services.trouble, "not_ready", headers=retry_after(1))
    return Ready(status="ready")


@router.get(
    "/metrics",
    summary="Read the counters",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"example": 'mia_queue_tokens{encoder="e1"} 0.0'}}}},
    dependencies=[Depends(require("read"))],
)
async def metrics(services: Annotated[Services, Depends(get_services)]) -> Response:
    """Return everything that is counted in Prometheus' text form."""
    return Response(services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
