"""Makes the preprocessor's parts from the job's settings."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import JobSpec
from pipelinerl_common.stream import Stream
from pipelinerl_preprocessor.batch import Layout
from pipelinerl_preprocessor.counters import Counters
from pipelinerl_preprocessor.events import EventLog
from pipelinerl_preprocessor.journal import JournalWriter
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_preprocessor.live import LiveLedger
from pipelinerl_preprocessor.publish_gate import PublishGate
from pipelinerl_preprocessor.reference import Reference
from pipelinerl_preprocessor.ring_buffer import RingBuffer
from pipelinerl_preprocessor.trained import TrainedLog
from pipelinerl_staleness.policy import Policy
from pipelinerl_staleness.recording import recorded
from pipelinerl_staleness.registry import make_policy


def policy_of(spec: JobSpec) -> Policy:
    """Policies that count trajectories get the job's group size. Raises SettingsError when the job
    gives them another one.
    """
    settings, group_size = spec.staleness.parse(), spec.task.group_size
    if "group_size" in settings.parameter_names():
        given = spec.staleness.parameters.get("group_size", group_size)
        if given != group_size:
            raise SettingsError(
                f"staleness.groupSize={given} differs from task.groupSize={group_size}: leave "
                "staleness.groupSize out"
            )
        settings = replace(settings, **{"group_size": group_size})
    return make_policy(settings, spec.algorithm.groups_per_step)


def ring_buffer_groups(spec: JobSpec, policy: Policy) -> int:
    """Room of the ring buffer; unless the job limits it, for everything that can be outstanding."""
    return spec.preprocessor.ring_buffer_groups or policy.max_outstanding()


def layout_of(spec: JobSpec) -> Layout:
    """The rows of a single rank."""
    return Layout(
        num_ranks=1,
        row_tokens=spec.trainers.micro_batch_tokens,
        temperature=spec.task.sampling.temperature,
        reference=spec.reference is not None,
        returns=spec.algorithm.baseline == "value",
    )


async def open_ledger(
    spec: JobSpec, stream: Stream, trained: TrainedLog, events: EventLog, metrics: Metrics
) -> LiveLedger:
    """The ledger as the journal has it, or one that waits for the trainer's Restore."""
    policy = recorded(policy_of(spec), events.write)
    settings = spec.preprocessor
    ledger = Ledger(
        policy,
        lease_s=settings.lease_seconds,
        max_attempts=settings.max_group_attempts,
        now=time.monotonic,
    )
    journal = JournalWriter(await stream.journal(), ledger)
    room = RingBuffer(ring_buffer_groups(spec, policy))
    # What runs ends within a trajectory's time, or its lease does: a policy that waits for it holds
    # no publish back longer.
    gate = PublishGate(ledger, spec.task.timeout_seconds + settings.lease_seconds, time.monotonic)
    note = partial(_note, events)
    live = LiveLedger(ledger, journal, room, gate, Counters(metrics), note)
    await journal.recover(live.now())
    if ledger.restored:
        trained.rewind(ledger.state.num_committed)
    return live


def _note(events: EventLog, what: str, values: list[Any]) -> None:
    events.write(what, values, None)


@asynccontextmanager
async def open_reference(spec: JobSpec, wiring: Wiring) -> AsyncIterator[Reference | None]:
    """None when the job has no reference model."""
    if spec.reference is None:
        yield None
        return
    temperature = spec.task.sampling.temperature
    async with Reference.open(
        wiring.references, temperature=temperature, token=wiring.token
    ) as reference:
        yield reference
