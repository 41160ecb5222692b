"""Metrics in Prometheus' text format, and `GET /metrics` of a process."""

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pipelinerl_common.errors import SettingsError

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHUTDOWN_S = 1.0
_AT_ONCE = 32
_HELP = b"# HELP "


@asynccontextmanager
async def serve_metrics(listen: str, *expositions: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serves the concatenated `expositions` on `listen` ("host:port", "" serves nothing) until the
    block is left.

    Yields the address with the port that was bound, or "". Runs in the event loop, and so do the
    callbacks of gauges. Raises SettingsError when the address cannot be bound.
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


def exposition_of(processes: Iterable[Collector]) -> Iterator[bytes]:
    """Yields the metrics of several jobs that live in one process, family by family, each once.

    Takes the processes one after the other and keeps none of them, and only some samples at a time:
    an operator has a thousand jobs to report at each scrape.
    """
    families: dict[bytes, bytearray] = {}
    each, num_taken = iter(processes), _AT_ONCE
    while num_taken == _AT_ONCE:
        several = _Several(itertools.islice(each, _AT_ONCE))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(several)
        text, num_taken = generate_latest(registry), several.num_taken
        for family in text.split(_HELP)[1:]:
            name = family.partition(b" ")[0]
            if name in families:
                families[name] += family.split(b"\n", 2)[2]  # without its HELP and TYPE
            else:
                families[name] = bytearray(_HELP + family)
    while families:
        yield bytes(families.pop(next(iter(families))))


class _Several(Collector):
    """Merges the families of some of `processes`, for one collection: they can be read once."""

    def __init__(self, processes: Iterable[Collector]) -> None:
        self._processes = processes
        self.num_taken = 0

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for metrics in self._processes:
            self.num_taken += 1
            for family in metrics.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples.extend(family.samples)
        yield from families.values()
