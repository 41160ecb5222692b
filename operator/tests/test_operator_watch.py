"""Watches over real HTTP: a server that has nothing to tell is well, one that is gone is not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.kube import Connection, Informer, Key, Selection, Store, open_api
from pipelinerl_operator.kube.resources import PODS

DEADLINE_S = 30.0


@dataclass
class Quiet:
    """An API server with one pod, whose watches send their headers and then nothing."""

    watches: int = 0
    since: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            pod = {"metadata": {"name": "a", "namespace": "team", "uid": "1", "resourceVersion": "7"}}
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
    connection = Connection(f"http://127.0.0.1:{server.addresses[0][1]}", "team", lambda: None, lambda: False)
    store = Store[PodView](PodView.of, lambda view: Key("team", "sums"), lambda key: None)
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


async def test_watches_however_many_leave_room_for_calls(
    quiet: Quiet, server: web.AppRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that serves several namespaces has nine watches in each, and a lease to renew beside them."""
    monkeypatch.setattr("pipelinerl_operator.kube.client.SILENCE_S", 600.0)
    connection = Connection(f"http://127.0.0.1:{server.addresses[0][1]}", "team", lambda: None, lambda: False)
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
