"""The HTTP interface: routes, the bearer token, and which error becomes which status."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pipelinerl_actor.generator.engine import GeneratorEngine, KVCache, Transfer
from pipelinerl_actor.generator.metrics import GeneratorMetrics
from pipelinerl_actor.generator.request_handler import BadRequest, Overloaded, RequestHandler
from pipelinerl_actor.generator.updater import WeightUpdate, WeightUpdater
from pipelinerl_actor.generator.weight_layout import ManifestMismatch
from pipelinerl_common.errors import (
    FatalError,
    MalformedMessage,
    PipelineRLError,
    Refused,
    Unavailable,
)
from pipelinerl_common.generator_api import (
    CancelRequest,
    CancelResponse,
    CompletionRequest,
    CompletionResponse,
    DrainResponse,
    ErrorDetail,
    ErrorResponse,
    HealthResponse,
    InitGroupRequest,
    InitGroupResponse,
    LoadResponse,
    ReadyResponse,
    ScoreRequest,
    ScoreResponse,
    UpdateRequest,
    UpdateResponse,
    WeightsResponse,
)
from pipelinerl_common.metrics import CONTENT_TYPE
from pipelinerl_common.tracing import TRACEPARENT, Tracer
from pipelinerl_weights.errors import TransferFailed, TransferTimeout
from pipelinerl_weights.manifest import Manifest

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# The first match counts.
STATUS: tuple[tuple[type[PipelineRLError], HTTPStatus], ...] = (
    (ManifestMismatch, HTTPStatus.UNPROCESSABLE_ENTITY),
    (MalformedMessage, HTTPStatus.UNPROCESSABLE_ENTITY),
    (BadRequest, HTTPStatus.BAD_REQUEST),
    (Refused, HTTPStatus.CONFLICT),
    (TransferTimeout, HTTPStatus.GATEWAY_TIMEOUT),
    (TransferFailed, HTTPStatus.INTERNAL_SERVER_ERROR),
    (Overloaded, HTTPStatus.SERVICE_UNAVAILABLE),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)
RETRY_AFTER_S = "1"


@dataclass(slots=True)
class RunningGenerator:
    """A generator as its routes see it."""

    engine: GeneratorEngine
    requests: RequestHandler
    updater: WeightUpdater
    metrics: GeneratorMetrics
    token: str | None
    drain_s: float
    tracer: Tracer = field(default_factory=Tracer)
    device_fault: Callable[[], str | None] = lambda: None
    """Returns at once why the process's GPU cannot be used, or None."""
    _fatal: FatalError | None = None
    _failed: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: FatalError) -> None:
        """Ends the process, because its engine or weights cannot be trusted."""
        self._fatal = error
        self._failed.set()

    async def watch(self) -> None:
        """Waits for `fail` and raises its error; runs until cancelled."""
        await self._failed.wait()
        raise self._fatal or FatalError("the generator failed")


def create_app(generator: RunningGenerator) -> FastAPI:
    """The generator's routes."""
    app = FastAPI(title="PipelineRL generator", docs_url=None, redoc_url=None, openapi_url=None)
    authorized = [Depends(_bearer(generator.token))]
    _add_serving_routes(app, generator, authorized)
    _add_weight_routes(app, generator, authorized)
    _add_probe_routes(app, generator)
    _add_error_handlers(app, generator)
    return app


def _add_serving_routes(app: FastAPI, generator: RunningGenerator, authorized: list[Any]) -> None:
    requests = generator.requests

    @app.post("/v1/chat/completions", dependencies=authorized)
    async def complete(body: CompletionRequest, request: Request) -> CompletionResponse:
        traceparent = request.headers.get(TRACEPARENT, "")
        with generator.tracer.continued("decode", traceparent, sequences=body.n):
            return await _while_connected(request, requests.complete(body))

    @app.post("/v1/cancel", dependencies=authorized)
    async def cancel(body: CancelRequest) -> CancelResponse:
        return CancelResponse(found=requests.cancel(body.request_id))

    @app.post("/v1/score", dependencies=authorized)
    async def score(body: ScoreRequest, request: Request) -> ScoreResponse:
        return await _while_connected(request, requests.score(body))

    @app.post("/drain", dependencies=authorized)
    async def drain() -> DrainResponse:
        return DrainResponse(drained=await requests.drain(generator.drain_s))


def _add_weight_routes(app: FastAPI, generator: RunningGenerator, authorized: list[Any]) -> None:
    updater = generator.updater

    @app.post("/init_process_group", dependencies=authorized)
    async def init_process_group(body: InitGroupRequest) -> InitGroupResponse:
        ranks = await updater.join(body)
        return InitGroupResponse(epoch=body.epoch, ranks=ranks)

    @app.post("/request_weight_update", dependencies=authorized)
    async def request_weight_update(body: UpdateRequest, request: Request) -> UpdateResponse:
        manifest = (
            updater.known_manifest(body.manifest_hash)
            if body.manifest is None
            else Manifest.from_json(body.manifest)
        )
        transfer = Transfer(body.version, manifest, body.timeout_s)
        update = WeightUpdate(
            body.epoch, transfer, body.mode, KVCache(body.kv_cache), body.allow_rollback
        )
        traceparent = request.headers.get(TRACEPARENT, "")
        with generator.tracer.continued(
            "receive weights", traceparent, version=body.version, mode=body.mode
        ) as receiving:
            # Shielded: an update that has begun must end, even if its caller disconnects.
            report = await asyncio.shield(asyncio.ensure_future(updater.update(update)))
            receiving.set(
                pause_s=report.pause_s, transfer_s=report.transfer_s, apply_s=report.apply_s
            )
        return report

    @app.get("/weights")
    async def weights() -> WeightsResponse:
        return WeightsResponse(
            version=updater.version,
            checksum=updater.checksum,
            epoch=updater.epoch,
            num_workers=generator.engine.num_workers,
            num_running=generator.requests.num_running,
            updates_total=updater.num_updates,
            update_failures_total=updater.num_failures,
            draining=generator.requests.draining,
        )


def _add_probe_routes(app: FastAPI, generator: RunningGenerator) -> None:
    @app.get("/health")
    async def health() -> HealthResponse:
        if (fault := generator.device_fault()) is not None:
            raise Unavailable(f"the GPU does not answer: {fault}")
        return HealthResponse()

    @app.get("/ready")
    async def ready() -> ReadyResponse:
        if not generator.requests.ready:
            raise Unavailable(
                "draining"
                if generator.requests.draining
                else "no weights of the job were received yet"
            )
        return ReadyResponse(version=generator.updater.version)

    @app.get("/load")
    async def load() -> LoadResponse:
        return generator.engine.load()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generator.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def _add_error_handlers(app: FastAPI, generator: RunningGenerator) -> None:
    def answer(status: int, message: str, kind: str) -> JSONResponse:
        # Clients wait and try another generator after 503, and give the request up after 4xx.
        detail = ErrorDetail(message=message, type=kind, serving_version=generator.updater.version)
        headers = (
            {"Retry-After": RETRY_AFTER_S} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        )
        return JSONResponse(ErrorResponse(error=detail).model_dump(), status, headers)

    @app.exception_handler(PipelineRLError)
    async def ours(request: Request, error: PipelineRLError) -> JSONResponse:
        if isinstance(error, FatalError):
            generator.fail(error)
        status = next(
            (status for kind, status in STATUS if isinstance(error, kind)),
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        return answer(status, str(error), type(error).__name__)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = [
            f"{'.'.join(map(str, fault['loc'][1:])) or 'body'}: {fault['msg']}"
            for fault in error.errors()
        ]
        return answer(HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(faults), "InvalidRequest")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), "HTTPException")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("path=%s failed", request.url.path, exc_info=error)
        return answer(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}", "InternalError"
        )


def _bearer(token: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode(), token.encode()
        ):
            raise HTTPException(
                HTTPStatus.UNAUTHORIZED, "the job's bearer token is missing or wrong"
            )

    return check


async def _while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Cancels `work` when the client disconnects, so that no sequence is decoded for nothing."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client disconnected")
        return working.result()
    finally:
        # Awaited after the cancel, so that the decode has stopped when the route returns.
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
