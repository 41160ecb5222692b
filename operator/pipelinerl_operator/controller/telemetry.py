"""The operator's own metrics and its HTTP port: `/metrics`, `/healthz` (liveness), `/readyz`
(readiness).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import OPERATOR, Metrics, exposition_of
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_operator.controller.cluster import AnyInformer
from pipelinerl_operator.controller.status import JobPhase
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import WorkQueue


class Telemetry:
    """Metrics of one replica. What only a leader has is missing while another replica leads."""

    def __init__(self, is_leader: Callable[[], bool]) -> None:
        self.metrics = Metrics(OPERATOR, job="")
        self._seconds = self.metrics.histogram("operator_reconcile_seconds")
        self._results = self.metrics.counter("operator_reconciles_total")
        self._requests = self.metrics.counter("operator_api_requests_total")
        self._of_jobs: Callable[[], Iterable[Metrics]] = lambda: []
        self._count_restarts: Callable[[], None] = lambda: None
        self.metrics.gauge("operator_leader").read(lambda: float(is_leader()))
        self.metrics.gauge("operator_memory_bytes").read(memory_bytes)

    def called(self, verb: str, code: int, seconds: float) -> None:
        """Counts a call of the API client; code 0 means no answer."""
        self._requests.inc(verb=verb, code=str(code) if code else "none")

    def reconciled(self, outcome: str, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._results.inc(outcome=outcome)

    def watch_queue(self, queue: WorkQueue | None) -> None:
        """Exports the queue; None while another replica leads."""
        self.metrics.gauge("operator_queue_depth").read(
            lambda: None if queue is None else float(queue.depth)
        )
        self.metrics.gauge("operator_queue_oldest_seconds").read(
            lambda: None if queue is None else queue.oldest_s
        )

    def watch_informers(self, informers: Iterable[AnyInformer]) -> None:
        """Exports the informers; empty while another replica leads."""
        followed = list(informers)
        self.metrics.gauge("operator_watch_silence_seconds").read(
            lambda: max((each.silence_s for each in followed), default=None)
        )
        restarts = self.metrics.counter("operator_watch_restarts_total")
        before = restarts.by_labels.get((), 0.0)
        self.metrics.gauge("operator_watches").read(lambda: float(len(followed)))
        self._count_restarts = lambda: restarts.reach(
            before + sum(each.restarts for each in followed)
        )

    def watch_jobs(self, jobs: Callable[[], Iterable[JobView]]) -> None:
        """Exports the number of jobs by phase; jobs without a phase are pending."""
        gauge = self.metrics.gauge("operator_jobs")

        def count(phase: JobPhase) -> Callable[[], float]:
            return lambda: float(
                sum(1 for view in jobs() if (view.phase or JobPhase.PENDING) == phase)
            )

        for phase in JobPhase:
            gauge.read(count(phase), phase=phase.value)

    def watch_runtimes(self, metrics: Callable[[], Iterable[Metrics]]) -> None:
        """Exports the metrics of the jobs' runtimes."""
        self._of_jobs = metrics

    def watch_nothing(self) -> None:
        """Exports no more of what only a leader has."""
        self.watch_queue(None)
        self.watch_informers([])
        self.watch_jobs(lambda: [])
        self._of_jobs = lambda: []

    def exposition(self) -> Iterator[bytes]:
        """All metrics in Prometheus' text format, each once, however many jobs have it."""
        self._count_restarts()
        return exposition_of(chain([self.metrics], self._of_jobs()))


Check = Callable[[], str]
"""Returns what is wrong, or an empty text when all is well."""


@asynccontextmanager
async def serve_health(
    listen: str, exposition: Callable[[], Iterable[bytes]], healthy: Check
) -> AsyncIterator[str]:
    """Serves on `listen` ("host:port") until the block is left. Yields the address that was bound.

    Raises SettingsError when it cannot be bound.
    """

    async def metrics(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_LATEST})
        await response.prepare(request)
        for part in exposition():  # 2 MB for 1000 jobs, which are not held twice
            await response.write(part)
        return response

    def answer(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond(request: web.Request) -> web.Response:
            fault = check()
            return web.Response(status=503 if fault else 200, text=fault or "ok")

        return respond

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/healthz", answer(healthy)),
            web.get("/readyz", answer(lambda: "")),
        ]
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
