"""The operator's own HTTP port: `/metrics`, `/healthz` for the kubelet's liveness, `/readyz` for
its readiness.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from pipelinerl_common.errors import SettingsError

Check = Callable[[], str]
"""Empty when all is well, else what is wrong."""


@asynccontextmanager
async def serve_health(
    listen: str, exposition: Callable[[], Iterable[bytes]], healthy: Check, ready: Check
) -> AsyncIterator[str]:
    """Serves on `listen` ("host:port") until the block is left. The address with the port that was
    really bound.

    Raises SettingsError when it cannot be bound.
    """

    async def metrics(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_LATEST})
        await response.prepare(request)
        for part in exposition():  # of a thousand jobs they are 2 MB, which is not held twice
            await response.write(part)
        return response

    def answer(check: Check) -> Callable[[web.Request], web.Response]:
        def respond(request: web.Request) -> web.Response:
            fault = check()
            return web.Response(status=503 if fault else 200, text=fault or "ok")

        return respond

    async def healthz(request: web.Request) -> web.Response:
        return answer(healthy)(request)

    async def readyz(request: web.Request) -> web.Response:
        return answer(ready)(request)

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        host, _, port = listen.rpartition(":")
        try:
            await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"--metrics-listen {listen}: cannot listen there: {error}"
            ) from error
        yield f"{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
