"""Runs an actor against a generator, an Admission service, a nats-server, and many tasks."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from actor_fakes import FakeAdmission, FakeGenerator, until

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_actor.rollout.start import run_actor
from pipelinerl_common import stream
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.types import SampleGroup

JOB = "rollout-test"

TASKS = """
import asyncio, math, time
from pipelinerl_actor.task import Prompt, Task, Verdict
from pipelinerl_common.errors import TemporaryError

class Base(Task):
    def prompt(self, index):
        return Prompt.of(f"prompt {index}", answer="7")
    async def verify(self, prompt, answer):
        return Verdict(float(answer.text == prompt.facts["answer"]), {"success": 1.0})

class Together(Base): pass

class Alone(Base):
    async def rollout(self, rollout):
        return await rollout.verify(await rollout.chat(rollout.prompt.messages))

class BrokenPrompt(Base):
    def prompt(self, index):
        raise KeyError("no such prompt")

class BrokenRollout(Base):
    async def rollout(self, rollout):
        raise ZeroDivisionError("task is broken")

class NotANumber(Base):
    async def verify(self, prompt, answer):
        return Verdict(math.nan)

class OneNotANumber(Alone):
    async def rollout(self, rollout):
        verdict = await super().rollout(rollout)
        return Verdict(math.inf) if rollout.sample_index == 1 else verdict

class Hangs(Base):
    async def verify(self, prompt, answer):
        await asyncio.Event().wait()

class HangsHard(Base):
    def verify(self, prompt, answer):
        if prompt.messages[0]["content"] == "prompt 0":
            time.sleep(3600)
        return Verdict(1.0)

class ShakyEnvironment(Alone):
    calls = {}
    async def rollout(self, rollout):
        number = self.calls[rollout.sample_index] = self.calls.get(rollout.sample_index, 0) + 1
        if number < 3:
            raise TemporaryError("the environment is unreachable")
        return await super().rollout(rollout)

class Lazy(Base):
    async def rollout(self, rollout):
        return Verdict(1.0)

async def function(rollout, *, right: str):
    content = f"{rollout.seed} {rollout.prompt_index}"
    turn = await rollout.chat([{"role": "user", "content": content}])
    return Verdict(float(turn.text == right) + rollout.sample_index)
"""


@dataclass
class ActorHarness:
    """Everything that an actor is connected to."""

    folder: Path
    generator: FakeGenerator
    admission: FakeAdmission
    nats: stream.NatsServer
    preprocessor: str = ""
    groups: list[SampleGroup] = field(default_factory=list)
    metrics: list[MetricsRecord] = field(default_factory=list)
    token_file: Path | None = None

    def failures(self) -> list[tuple[str, str]]:
        return [
            (event.lease_id, event.reason)
            for event in self.admission.outcomes(pb.GROUP_OUTCOME_FAILED)
        ]

    def last_metric(self, name: str) -> float:
        return self.metrics[-1].values.get(name, 0.0)


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncIterator[ActorHarness]:
    generator, admission = FakeGenerator(), FakeAdmission()
    async with (
        generator.serving(),
        admission.serving() as address,
        stream.NatsServer.start(folder / "nats") as nats,
        stream.connect(nats.url, JOB, StreamSettings(), name="test") as reader,
        reader.samples(max_pending=1000) as received,
        reader.metrics() as records,
    ):
        harness = ActorHarness(folder, generator, admission, nats, address)

        async def read_groups() -> None:
            async for each in received:
                harness.groups.append(each.group)
                await each.ack()

        async def read_metrics() -> None:
            async for record in records:
                harness.metrics.append(record)

        reading = [asyncio.ensure_future(read_groups()), asyncio.ensure_future(read_metrics())]
        yield harness
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def wiring_of(
    harness: ActorHarness,
    task: dict[str, Any],
    actors: dict[str, Any],
    generators: Sequence[str] | None = None,
    model_len: int = 64,
) -> Wiring:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": JOB},
        "spec": {
            "model": {"uri": "unused", "maxModelLen": model_len},
            "task": {"groupSize": 4, "maxRetries": 2, "sampling": {"maxTokens": 8}, **task},
            "actors": actors,
        },
    }
    job_file = harness.folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(document))
    return Wiring(
        job_file=job_file,
        name="actor-0",
        output=harness.folder,
        listen="127.0.0.1:0",
        nats_url=harness.nats.url,
        preprocessor=harness.preprocessor,
        coordinator="",
        generators=tuple(generators if generators is not None else (harness.generator.url,)),
        references=(),
        token_file=harness.token_file,
        log_level="info",
    )


@asynccontextmanager
async def acting(
    harness: ActorHarness,
    task: str,
    *,
    actors: dict[str, Any] | None = None,
    generators: Sequence[str] | None = None,
    model_len: int = 64,
    **task_fields: Any,
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Event]]:
    """Runs an actor with `task` while the block runs; it must end cleanly when it is stopped after
    the run.
    """
    wiring = wiring_of(
        harness,
        {"path": f"harness_tasks:{task}", **task_fields},
        actors or {},
        generators,
        model_len,
    )
    stop = asyncio.Event()
    actor = asyncio.ensure_future(run_actor(wiring, stop))
    try:
        yield actor, stop
        harness.admission.done = True
        stop.set()
        async with asyncio.timeout(60):
            await actor
    finally:
        actor.cancel()
        await asyncio.gather(actor, return_exceptions=True)


async def alive(actor: asyncio.Task[None], condition: Callable[[], object]) -> None:
    """Waits for the condition; an actor that ends before fails the test with its own error."""
    await until(lambda: actor.done() or condition())
    if actor.done() and not condition():
        await actor
        raise AssertionError("the actor ended")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
