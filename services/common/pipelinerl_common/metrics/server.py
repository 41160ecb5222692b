"""`GET /metrics` of a process, for Prometheus to scrape."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from pipelinerl_common.errors import SettingsError

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHUTDOWN_S = 1.0


@asynccontextmanager
async def serve_metrics(listen: str, *expositions: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serves what `expositions` say, one after another, on `listen` ("host:port", "" serves
    nothing) until the block is left.

    The address with the port that was really bound, or "". Runs in the event loop: so do the
    readings of gauges. Raises SettingsError when the address cannot be bound.
    """
    if not listen:
        yield ""
        return
    host, _, port = listen.rpartition(":")

    async def metrics(request: web.Request) -> web.Response:
        body = b"".join(exposition() for exposition in expositions)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"--metrics-listen {listen}: cannot listen there: {error}"
            ) from error
        address = f"{host}:{runner.addresses[0][1]}"
        log.info("metrics=http://%s/metrics", address)
        yield address
    finally:
        await runner.cleanup()
