"""The trainer's report of its steps, over a real nats-server."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trainer_fakes as fakes
from trainer_fake_services import DEADLINE_S, until

from pipelinerl_common import stream
from pipelinerl_common.metrics import TRAINER, Metrics
from pipelinerl_common.stream import Login, NatsServer
from pipelinerl_trainer.loop import StepTimer
from pipelinerl_trainer.metrics import StepMetrics
from pipelinerl_trainer.report import Reporter, StepReport

SETTINGS = fakes.job().spec.stream


def report(step: int) -> StepReport:
    values = {**StepMetrics().values(), "learning_rate": 0.1, "skipped_steps_total": 0.0}
    return StepReport(
        fakes.plan_of(fakes.trajectories(2), step), values, StepTimer().seconds, 1.0, 0
    )


async def test_steps_that_are_done_while_the_stream_s_server_is_away_are_told_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(Metrics(TRAINER, "toy"), "trainer-0")
    async with AsyncExitStack() as first:
        server = await first.enter_async_context(NatsServer.start(tmp_path))
        running = asyncio.create_task(reporter.run(server.url, SETTINGS, Login()))
        async with stream.connect(server.url, "toy", SETTINGS, name="test") as connection:
            reporter.step_done(1, report(0))
            async with connection.metrics() as records, asyncio.timeout(DEADLINE_S):
                assert (await anext(records)).step == 1
            await first.aclose()
            await until(
                lambda: caplog.text.count("the connection to nats is lost") == 2,
                "the loss of both connections",
            )
            for step in (2, 3):
                reporter.step_done(step, report(step - 1))
            await reporter.finish(0.1)
            async with (
                NatsServer.start(tmp_path, server.port),
                connection.metrics() as records,
                asyncio.timeout(DEADLINE_S),
            ):
                assert [(await anext(records)).step for _ in range(3)] == [1, 2, 3]
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
