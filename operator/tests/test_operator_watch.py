"""Watches over real HTTP: a server without events is healthy, one that is gone is not."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from pipelinerl_operator.__main__ import parse
from pipelinerl_operator.controller.leader import serve_operator
from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.kube import ApiConnection, Informer, ObjectKey, Selection, Store, open_api
from pipelinerl_operator.kube.client import MAX_CALLS
from pipelinerl_operator.kube.errors import ApiUnavailable
from pipelinerl_operator.kube.resources import PODS

DEADLINE_S = 30.0


@dataclass
class Quiet:
    """An API server with one pod, whose watches send their headers and then nothing."""

    watches: int = 0
    since: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            pod = {
                "metadata": {"name": "a", "namespace": "team", "uid": "1", "resourceVersion": "7"}
            }
            return web.json_response({"items": [pod], "metadata": {"resourceVersion": "7"}})
        self.watches += 1
        self.since.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    monkeypatch.setattr("pipelinerl_operator.kube.client.SILENCE_S", 0.2)
    monkeypatch.setattr("pipelinerl_operator.kube.informer.MIN_PAUSE_S", 0.01)
    monkeypatch.setattr("pipelinerl_operator.kube.informer.FIRST_BACKOFF_S", 0.05)
    return Quiet()


@pytest.fixture
async def server(quiet: Quiet) -> AsyncIterator[web.AppRunner]:
    app = web.Application()
    app.router.add_get("/api/v1/pods", quiet.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner
    await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_a_kind_that_does_not_change_is_watched_on_from_where_it_was_and_counts_as_heard_of(
    quiet: Quiet, server: web.AppRunner
) -> None:
    connection = ApiConnection(
        f"http://127.0.0.1:{server.addresses[0][1]}", "team", lambda: None, lambda: False
    )
    store = Store[PodView](PodView.of, lambda view: ObjectKey("team", "sums"), lambda key: None)
    async with open_api(connection) as api:
        informer = Informer(api, Selection(PODS), store)
        running = asyncio.create_task(informer.run())
        try:
            await until(lambda: quiet.watches >= 4)
            assert informer.restarts == 0
            assert set(quiet.since) == {"7"}
            heard_at = informer._heard_at
            await until(lambda: informer._heard_at > heard_at)
            assert len(store) == 1
            await server.cleanup()
            await until(lambda: informer.restarts >= 2)
            silent_since = informer._heard_at
            await until(lambda: informer.restarts >= 4)
            assert informer._heard_at == silent_since
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def reporting() -> AsyncIterator[web.AppRunner]:
    """A server whose watches report pods in odd pieces, the second larger than any buffer."""
    pods = [
        {"metadata": {"name": name, "resourceVersion": "8", "annotations": {"a": "x" * size}}}
        for name, size in PODS_REPORTED
    ]
    lines = b"".join(json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n" for pod in pods)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for begin in range(0, len(lines), 70_001):
            await response.write(lines[begin : begin + 70_001])
        return response

    app = web.Application()
    app.router.add_get("/api/v1/pods", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner
    await runner.cleanup()


PODS_REPORTED = (("a", 10), ("b", 1_500_000), ("c", 0), ("d", 100_000))


async def test_events_of_any_size_arrive_whole(
    reporting: web.AppRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = ApiConnection(
        f"http://127.0.0.1:{reporting.addresses[0][1]}", "team", lambda: None, lambda: False
    )
    async with open_api(connection) as api:
        reported = [event.body["metadata"] async for event in api.watch(Selection(PODS), "7")]
        assert [(each["name"], len(each["annotations"]["a"])) for each in reported] == list(
            PODS_REPORTED
        )
        monkeypatch.setattr("pipelinerl_operator.kube.client.MAX_EVENT_BYTES", 1 << 20)
        with pytest.raises(ApiUnavailable, match="an event of more than 1048576 bytes"):
            [event async for event in api.watch(Selection(PODS), "7")]


async def test_watches_however_many_leave_room_for_calls(
    quiet: Quiet, server: web.AppRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that serves several namespaces has nine watches in each, and a lease to renew
    beside them.
    """
    monkeypatch.setattr("pipelinerl_operator.kube.client.SILENCE_S", 600.0)
    connection = ApiConnection(
        f"http://127.0.0.1:{server.addresses[0][1]}", "team", lambda: None, lambda: False
    )
    async with open_api(connection) as api:

        async def watch() -> None:
            async for _ in api.watch(Selection(PODS), "7"):
                pass

        watching = [asyncio.create_task(watch()) for _ in range(40)]
        try:
            await until(lambda: quiet.watches == 40)
            async with asyncio.timeout(DEADLINE_S):
                assert [len(page.items) async for page in api.pages(Selection(PODS))] == [1]
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


@dataclass
class Stuck:
    """An API server that answers nothing but what it is and its Lease."""

    num_stuck: int = 0
    holders: list[str] = field(default_factory=list)
    """What each write of the Lease says while other calls are stuck; empty when it is given back.
    """
    lease: dict[str, dict[str, str]] | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return web.json_response({"major": "1", "minor": "36"})
        if request.path == "/apis":
            return web.json_response({"groups": []})
        if "/leases" in request.path:
            return await self._lease(request)
        self.num_stuck += 1
        await asyncio.Event().wait()
        return web.Response()

    async def _lease(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(
                self.lease or {"message": "no lease"}, status=200 if self.lease else 404
            )
        self.lease = lease = await request.json()
        if self.num_stuck >= MAX_CALLS:
            self.holders.append(lease["spec"]["holderIdentity"])
        return web.json_response(self.lease)


async def test_the_lease_is_renewed_while_every_other_call_waits_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, stop = Stuck(), asyncio.Event()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stuck.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    connection = ApiConnection(
        f"http://127.0.0.1:{runner.addresses[0][1]}", "team", lambda: None, lambda: False
    )
    monkeypatch.setattr(
        "pipelinerl_operator.controller.leader.find_connection", lambda *_: connection
    )
    images = [f"--{role}-image={role}" for role in ("actor", "trainer", "preprocessor")]
    listen = ["--metrics-listen=127.0.0.1:0", "--coordinator-listen=127.0.0.1:0"]
    arguments = parse(
        ["--coordinator=operator:50052", "--nats-url=nats://127.0.0.1:4222", *images, *listen]
    )
    serving = asyncio.create_task(serve_operator(arguments, "me", stop))
    try:
        await until(lambda: len(stuck.holders) >= 2 or serving.done())
        assert stuck.holders == ["me", "me"]
    finally:
        stop.set()
        await asyncio.wait({serving}, timeout=DEADLINE_S)
        await runner.cleanup()
    await serving
