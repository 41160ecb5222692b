"""Reference log-probs over real HTTP: values, faults, load; and a whole job with a reference."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from preprocessor_fakes import make_sample
from preprocessor_harness import harness

from pipelinerl_common.errors import PermanentError, SettingsError, Unavailable
from pipelinerl_common.types import VersionRun
from pipelinerl_preprocessor.reference import Reference
from pipelinerl_preprocessor.rows import TrainSequence

WITH_KL = {"groupsPerStep": 2, "kl": {"coefficient": 0.1}}


class Scorer:
    """A generator's /v1/score: token t scores -t/1000 unless `answers` says otherwise."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.arrived: asyncio.Queue[None] = asyncio.Queue()
        self.hold = asyncio.Event()
        self.hold.set()
        self.url = ""
        self.headers: list[str] = []

    async def score(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers.get("Authorization", ""))
        self.arrived.put_nowait(None)
        await self.hold.wait()
        if self.answers:
            status, answer = self.answers.pop(0)
            return web.json_response(answer, status=status)
        logprobs = [
            [-token / 1000 for token in each["token_ids"][each["start"] :]]
            for each in body["sequences"]
        ]
        return web.json_response({"logprobs": logprobs, "weight_version": 0})


@asynccontextmanager
async def scorer() -> AsyncIterator[Scorer]:
    made = Scorer()
    application = web.Application()
    application.router.add_post("/v1/score", made.score)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    made.url = f"http://{host}:{port}"
    try:
        yield made
    finally:
        await runner.cleanup()


def sequence(segments: tuple[int, ...], first_id: int = 0) -> TrainSequence:
    num_sampled = sum(segments[1::2])
    return TrainSequence(
        token_ids_S=np.arange(first_id, first_id + sum(segments), dtype=np.uint32),
        segment_lengths=segments,
        logprobs_T=np.zeros(num_sampled, np.float32),
        ref_logprobs_T=None,
        version_runs=(VersionRun(0, num_sampled),),
        advantage=0.0,
        returns_T=None,
        reward=0.0,
    )


async def test_sampled_tokens_are_picked_and_the_temperature_is_sent() -> None:
    async with (
        scorer() as server,
        Reference.open([server.url + "/"], temperature=0.7, token="secret") as reference,
    ):
        columns = await reference.score(
            [sequence((2, 3), 10), sequence((1, 1, 2, 1), 20), sequence((1, 1), 30)]
        )
    assert [np.round(column * -1000).tolist() for column in columns] == [
        [12, 13, 14],
        [21, 24],
        [31],
    ]
    [request] = server.requests
    assert request["temperature"] == 0.7
    assert [each["start"] for each in request["sequences"]] == [2, 1, 1]
    assert server.headers == ["Bearer secret"]


async def test_another_generator_is_asked_when_one_fails() -> None:
    async with scorer() as first, scorer() as second:
        first.answers = [(503, {}), (503, {})]
        async with Reference.open(
            [first.url, second.url], temperature=1.0, token=None
        ) as reference:
            [column] = await reference.score([sequence((1, 1), 5)])
    assert column.tolist() == [np.float32(-0.006)]
    assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_calls_go_to_the_least_loaded() -> None:
    async with scorer() as first, scorer() as second:
        arrived = first.arrived = second.arrived
        first.hold.clear()
        second.hold.clear()
        async with Reference.open(
            [first.url, second.url], temperature=1.0, token=None
        ) as reference:
            calls = [
                asyncio.create_task(reference.score([sequence((1, length))]))
                for length in (100, 10, 10, 10)
            ]
            async with asyncio.timeout(10):
                for _ in range(4):
                    await arrived.get()
            first.hold.set()
            second.hold.set()
            await asyncio.gather(*calls)
    assert sorted([len(first.requests), len(second.requests)]) == [1, 3]


async def test_it_gives_up_at_the_deadline() -> None:
    async with scorer() as server:
        server.answers = [(500, {})] * 50
        async with Reference.open(
            [server.url], temperature=1.0, token=None, give_up_s=0.5
        ) as reference:
            with pytest.raises(Unavailable, match="HTTP 500"):
                await reference.score([sequence((1, 1))])
    async with Reference.open(
        [server.url], temperature=1.0, token=None, give_up_s=0.1
    ) as reference:
        with pytest.raises(Unavailable, match="ClientConnectorError"):
            await reference.score([sequence((1, 1))])


@pytest.mark.parametrize(
    ("status", "answer", "match"),
    [
        (400, {"error": "too long"}, "HTTP 400.*too long"),
        (200, {"logprobs": [[0.0, 0.0]], "weight_version": 0}, "2 log-probs for 1 tokens"),
        (200, {"logprobs": [], "weight_version": 0}, "0 sequences instead of 1"),
        (200, {"other": 1}, "not the expected answer"),
        (
            200,
            {"logprobs": [[math.inf]], "weight_version": 0},
            "not the expected answer|not finite",
        ),
    ],
)
async def test_nonsense_is_not_retried(status: int, answer: dict[str, Any], match: str) -> None:
    async with scorer() as server:
        server.answers = [(status, answer)]
        async with Reference.open([server.url], temperature=1.0, token=None) as reference:
            with pytest.raises(PermanentError, match=match):
                await reference.score([sequence((1, 1))])
    assert len(server.requests) == 1


async def test_a_reference_without_an_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="--reference"):
        async with Reference.open([], temperature=1.0, token=None):
            raise AssertionError("opened")


async def test_a_job_with_a_reference_gets_the_column_and_drops_what_is_refused(
    tmp_path: Path,
) -> None:
    async with (
        scorer() as server,
        harness(
            tmp_path, "--reference", server.url, algorithm=WITH_KL, reference={}
        ) as preprocessor,
    ):
        server.answers = [(400, {"error": "too long"})]
        await preprocessor.begin()
        leases = (await preprocessor.lease(1)).leases
        await preprocessor.publish(leases[0])
        assert await preprocessor.metric("groups_dropped_total{reason=reference}", 1) == 1
        await preprocessor.roll_out(2)
        [row] = (await preprocessor.pull(0)).rows
        assert row.ref_logprobs_L is not None
        trained = row.ref_logprobs_L[row.loss_mask_L == 1]
        np.testing.assert_allclose(trained, [-0.103, -0.104, -0.105, -0.106] * 4)
        assert make_sample(0, 0.0).token_ids_S[3] == 103


async def test_a_rewind_while_a_group_is_scored_drops_it_once(tmp_path: Path) -> None:
    async with (
        scorer() as server,
        harness(
            tmp_path, "--reference", server.url, algorithm=WITH_KL, reference={}
        ) as preprocessor,
    ):
        server.hold.clear()
        await preprocessor.begin()
        await preprocessor.roll_out(1)
        await server.arrived.get()
        await preprocessor.restore()
        server.hold.set()
        await preprocessor.mark_published(0)
        await preprocessor.roll_out(2)
        pulled = await preprocessor.pull(0)
        assert pulled.plan.group_ids == ("1-0", "1-1")
        assert await preprocessor.metric("groups_dropped_total{reason=rollback}", 1) == 1


async def test_a_job_with_a_reference_and_no_address_says_so(tmp_path: Path) -> None:
    async with harness(
        tmp_path, started=False, algorithm={"kl": {"coefficient": 0.1}}, reference={}
    ) as preprocessor:
        with pytest.raises(AssertionError, match="--reference URL"):
            await preprocessor.start()
        assert await preprocessor.stop() == 2
