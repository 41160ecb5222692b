"""Informers, the work queue and the election, on an API server in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from operator_fake_api import FakeApi, Fault
from operator_fakes import job

from pipelinerl_operator.controller.leader import LEADER, leader_label
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import (
    Election,
    Informer,
    LeaseTimes,
    Object,
    ObjectKey,
    Resource,
    Selection,
    Store,
    WatchEvent,
    WorkQueue,
)
from pipelinerl_operator.kube.errors import (
    AlreadyExists,
    ApiUnavailable,
    Conflict,
    Forbidden,
    TooManyRequests,
    error_of,
)
from pipelinerl_operator.kube.resources import JOBS, LEASES, PODS

SUMS = ObjectKey("default", "sums")
LEASE = ObjectKey("operators", "pipelinerl")
QUICK = LeaseTimes(duration_s=0.6, renew_s=0.4, retry_s=0.05, stop_s=2.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what is waited for is the state of others
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(api: FakeApi) -> AsyncIterator[tuple[Informer[JobView], list[ObjectKey]]]:
    changes: list[ObjectKey] = []
    store = Store[JobView](JobView.of, lambda view: view.key, changes.append)
    informer = Informer(api, Selection(JOBS), store)
    task = asyncio.create_task(informer.run())
    try:
        await until(informer.synced.is_set)
        yield informer, changes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_informer_sees_what_there_is_and_what_comes_and_goes() -> None:
    api = FakeApi()
    await api.create(JOBS, "default", job())
    async with following(api) as (informer, changes):
        assert informer.store.get(SUMS) is not None
        await api.create(JOBS, "default", job("more"))
        await until(lambda: informer.store.get(ObjectKey("default", "more")) is not None)
        api.remove(JOBS, SUMS)
        await until(lambda: informer.store.get(SUMS) is None)
        assert changes == [SUMS, ObjectKey("default", "more"), SUMS]


async def test_an_informer_lists_again_when_its_version_is_too_old_and_finds_what_it_missed() -> (
    None
):
    api = FakeApi()
    await api.create(JOBS, "default", job())
    async with following(api) as (informer, _):
        api.oldest = 10**9
        await api.create(JOBS, "default", job("missed"))
        del api.objects[JOBS, SUMS]
        await until(lambda: informer.restarts > 0)
        api.oldest = 0
        await until(lambda: informer.store.get(ObjectKey("default", "missed")) is not None)
        await until(lambda: informer.store.get(SUMS) is None)


async def test_an_informer_goes_on_after_its_watch_was_cut_off() -> None:
    """An operator that stops watching after a network failure."""
    api = FakeApi()
    real, cuts = api.watch, [0]

    async def cut(selection: Selection, since: str) -> AsyncIterator[WatchEvent]:
        if cuts[0] < 2:
            cuts[0] += 1
            raise ApiUnavailable("connection reset")
        async for event in real(selection, since):
            yield event

    api.watch = cut  # type: ignore[method-assign]
    async with following(api) as (informer, _):
        await api.create(JOBS, "default", job())
        await until(lambda: informer.store.get(SUMS) is not None)
        assert informer.restarts == 2


async def test_a_store_never_goes_back_to_an_older_version() -> None:
    store = Store[JobView](JobView.of, lambda view: view.key, lambda key: None)
    old, new = job(), job()
    old["metadata"] |= {"uid": "u", "resourceVersion": "9"}
    new["metadata"] |= {"uid": "u", "resourceVersion": "10"}
    store.put(new)
    store.put(old)
    found = store.get(SUMS)
    assert found is not None
    assert found.resource_version == "10"


async def test_the_queue_holds_a_key_once_and_never_gives_it_to_two_workers() -> None:
    queue = WorkQueue()
    queue.add(SUMS)
    queue.add(SUMS)
    assert await queue.get() == SUMS
    queue.add(SUMS)
    assert queue.depth == 0
    queue.done(SUMS)
    assert queue.depth == 1


async def test_the_queue_takes_the_earliest_of_several_wishes_and_waits_longer_after_each_failure() -> (  # noqa: E501
    None
):
    queue = WorkQueue()
    queue.add_after(SUMS, 3600)
    queue.add_after(SUMS, 0.01)
    async with asyncio.timeout(10):
        assert await queue.get() == SUMS
    pauses = [queue.retry(SUMS) for _ in range(6)]
    assert pauses[5] > 8 * pauses[0]
    assert queue.retry(SUMS, at_least_s=30) >= 30
    queue.succeeded(SUMS)
    assert queue.retry(SUMS) < 0.1


class Work:
    """What a leader does: notes that it runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.is_running = False

    async def lead(self) -> None:
        self.runs, self.is_running = self.runs + 1, True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False


async def test_one_replica_leads_and_the_next_takes_over_when_it_stops() -> None:
    api = FakeApi()
    works, stops = [Work(), Work()], [asyncio.Event(), asyncio.Event()]
    elections = [Election(api, LEASE, name, QUICK) for name in ("a", "b")]
    tasks = [
        asyncio.create_task(each.run(work.lead, stop))
        for each, work, stop in zip(elections, works, stops, strict=True)
    ]
    await until(lambda: any(work.is_running for work in works))
    first = next(index for index, work in enumerate(works) if work.is_running)
    assert not works[1 - first].is_running
    stops[first].set()
    await tasks[first]
    assert not works[first].is_running
    await until(lambda: works[1 - first].is_running)
    lease = await api.get(LEASES, LEASE.namespace, LEASE.name)
    assert lease["spec"]["holderIdentity"] == ("a", "b")[1 - first]
    stops[1 - first].set()
    await tasks[1 - first]


async def test_a_leader_that_cannot_renew_stops_its_work_before_another_begins() -> None:
    api = FakeApi()
    work, stop = Work(), asyncio.Event()
    task = asyncio.create_task(Election(api, LEASE, "a", QUICK).run(work.lead, stop))
    await until(lambda: work.is_running)
    api.fault = lambda call: Fault(ApiUnavailable("away"))
    await until(lambda: not work.is_running)
    lease = await api.get(LEASES, LEASE.namespace, LEASE.name)
    assert lease["spec"]["holderIdentity"] == "a", "no other replica has it yet"
    api.fault = lambda call: None
    await until(lambda: work.runs == 2)
    stop.set()
    await task


async def test_a_leader_whose_lease_another_took_stops() -> None:
    api = FakeApi()
    work, stop = Work(), asyncio.Event()
    task = asyncio.create_task(Election(api, LEASE, "a", QUICK).run(work.lead, stop))
    await until(lambda: work.is_running)
    api.edit(
        LEASES,
        LEASE,
        lambda body: body["spec"].update(holderIdentity="b", leaseDurationSeconds=3600),
    )
    await until(lambda: not work.is_running)
    stop.set()
    await task
    lease = await api.get(LEASES, LEASE.namespace, LEASE.name)
    assert lease["spec"]["holderIdentity"] == "b"


async def test_a_renewal_that_succeeds_while_it_is_cancelled_is_the_last() -> None:
    class CancellingApi(FakeApi):
        async def replace(self, resource: Resource, namespace: str, body: Object) -> Object:
            written = await super().replace(resource, namespace, body)
            asyncio.get_running_loop().call_soon(renewing.cancel)
            return written

    election = Election(CancellingApi(), LEASE, "a", QUICK)
    assert await election._acquire()
    renewing = asyncio.create_task(election._renew_while_possible())
    await asyncio.wait({renewing}, timeout=4 * QUICK.renew_s)
    cancelled = renewing.cancelled()
    renewing.cancel()
    assert cancelled


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (409, b'{"reason": "AlreadyExists"}', AlreadyExists),
        (409, b'{"reason": "Conflict"}', Conflict),
        (403, b'{"details": {"causes": [{"reason": "NamespaceTerminating"}]}}', Forbidden),
        (500, b"upstream connect error", ApiUnavailable),
    ],
)
def test_answers_become_our_errors(code: int, body: bytes, kind: type[Exception]) -> None:
    error = error_of("create pods default/a", code, body)
    assert type(error) is kind
    assert not isinstance(error, Forbidden) or error.namespace_terminating


def test_a_server_says_when_to_come_back() -> None:
    error = error_of("get", 429, b"{}", "7")
    assert isinstance(error, TooManyRequests)
    assert error.retry_after_s == 7


async def test_a_leader_takes_the_label_off_its_own_release_and_no_other() -> None:
    api = FakeApi()
    for name, release in (("old", "one"), ("new", "one"), ("other", "two")):
        labels = {
            "app.kubernetes.io/instance": release,
            **({} if name == "new" else {LEADER: "true"}),
        }
        await api.create(PODS, "rl", {"metadata": {"name": name, "labels": labels}})

    def leaders() -> list[str]:
        return [
            pod["metadata"]["name"] for pod in api.list(Selection(PODS, "rl", f"{LEADER}=true"))
        ]

    async with leader_label(api, ObjectKey("rl", "new"), {"app.kubernetes.io/instance": "one"}):
        assert leaders() == ["new", "other"]
    assert leaders() == ["other"]
