"""Starts a whole preprocessor on a real nats-server; the test is its actor and its trainer."""

import asyncio
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from preprocessor_fakes import job_document, make_group

from pipelinerl.v1 import admission_pb2 as apb
from pipelinerl.v1 import batches_pb2 as bpb
from pipelinerl.v1.admission_pb2_grpc import AdmissionStub
from pipelinerl.v1.batches_pb2_grpc import BatchesStub
from pipelinerl_common.child_process import send_signal
from pipelinerl_common.codec import micro_batch_from_proto, plan_from_proto
from pipelinerl_common.rpc import Channel, call, connect, stream_call
from pipelinerl_common.settings import parse_job
from pipelinerl_common.stream import NatsServer, Stream
from pipelinerl_common.stream import connect as connect_stream
from pipelinerl_common.types import (
    MicroBatch,
    StepPlan,
)

DEADLINE_S = 60.0


@dataclass
class Pulled:
    """The plan and the rows that one rank received for a step."""

    plan: StepPlan
    rows: list[MicroBatch]


@dataclass
class PreprocessorHarness:
    """One nats-server and one preprocessor process at a time, which can be killed and restarted."""

    job_file: Path
    output: Path
    nats: NatsServer
    stream: Stream
    process: asyncio.subprocess.Process | None = None
    address: str = ""
    """The address of the process's services."""
    _channel: Channel | None = None
    actor_session: str = "session-1"
    log_lines: list[str] = field(default_factory=list)
    _reading: asyncio.Task[None] | None = None
    _opened: Any = None

    # The process

    async def start(self, *flags: str) -> None:
        arguments = [
            "--job",
            str(self.job_file),
            "--output",
            str(self.output),
            "--nats-url",
            self.nats.url,
            *flags,
        ]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipelinerl_preprocessor",
            *arguments,
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_log(self.process, address))
        async with asyncio.timeout(DEADLINE_S):
            self.address = await address
            self._opened = connect(self.address, token=None)
        self._channel = await self._opened.__aenter__()

    async def _read_log(
        self, process: asyncio.subprocess.Process, address: "asyncio.Future[str]"
    ) -> None:
        assert process.stderr is not None
        async for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self.log_lines.append(line)
            if (found := re.search(r"serving address=(\S+)", line)) and not address.done():
                address.set_result(found[1])
        if not address.done():
            address.set_exception(AssertionError("\n".join(self.log_lines)))

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends the process and returns its status."""
        assert self.process is not None
        assert self._reading is not None
        send_signal(self.process, how)
        async with asyncio.timeout(DEADLINE_S):
            status = await self.process.wait()
            await asyncio.wait([self._reading])
        self._reading.exception()
        if self._opened is not None:
            await self._opened.__aexit__(None, None, None)
        self._opened = self._channel = self.process = None
        return status

    async def crash(self) -> None:
        """kill -9, and a new process on the same store."""
        await self.stop(signal.SIGKILL)
        await self.start()

    @property
    def channel(self) -> Channel:
        assert self._channel is not None, "the preprocessor is not running"
        return self._channel

    # The actor's part

    async def lease(
        self,
        max_groups: int,
        *,
        wait_s: float = 5.0,
        running: Sequence[str] = (),
        actor: str = "actor-0",
        session: str | None = None,
    ) -> apb.LeaseResponse:
        request = apb.LeaseRequest(
            actor_id=actor,
            session_id=session or self.actor_session,
            max_groups=max_groups,
            wait_s=wait_s,
            running_lease_ids=running,
        )
        return await call(AdmissionStub(self.channel).Lease, request, timeout_s=DEADLINE_S)

    async def report(
        self,
        lease_id: str,
        outcome: "apb.GroupOutcome.ValueType",
        actor: str = "actor-0",
        **fields: Any,
    ) -> None:
        event = apb.GroupEvent(lease_id=lease_id, outcome=outcome, **fields)
        request = apb.ReportRequest(actor_id=actor, events=[event])
        await call(AdmissionStub(self.channel).Report, request, timeout_s=DEADLINE_S)

    async def roll_out(self, num_groups: int, version: int = 0) -> list[apb.GroupLease]:
        """Leases groups and publishes a good result for each."""
        leases: list[apb.GroupLease] = []
        while len(leases) < num_groups:
            granted = (await self.lease(num_groups - len(leases))).leases
            assert granted, f"nothing granted after {len(leases)} of {num_groups}"
            leases.extend(granted)
        for lease in leases:
            await self.publish(lease, version=version)
        return leases

    async def publish(self, lease: apb.GroupLease, **fields: Any) -> None:
        fields = {"prompt_index": lease.prompt_index, "attempt": lease.attempt, **fields}
        await self.stream.publish_group(make_group(lease.group_id, **fields))

    # The trainer's part

    async def restore(
        self,
        step: int = 0,
        snapshot: bpb.LedgerSnapshot | None = None,
        restore_id: str | None = None,
    ) -> bool:
        request = bpb.RestoreRequest(
            restore_id=restore_id or uuid.uuid4().hex, num_committed_steps=step, snapshot=snapshot
        )
        response = await call(BatchesStub(self.channel).Restore, request, timeout_s=DEADLINE_S)
        return response.rewound

    async def mark_published(self, version: int) -> None:
        request = bpb.MarkPublishedRequest(policy_version=version)
        await call(BatchesStub(self.channel).MarkPublished, request, timeout_s=DEADLINE_S)

    async def begin(self) -> None:
        """A fresh run with version 0 served."""
        await self.restore()
        await self.mark_published(0)

    async def pull_once(
        self,
        step: int,
        rank: int = 0,
        num_ranks: int = 1,
        wait_s: float = 10.0,
        batch_id: str = "",
        num_had: int = 0,
    ) -> Pulled | str | None:
        """The batch or new rows of `batch_id`, the reason to wait, or None at the end."""
        request = bpb.PullStepRequest(
            step=step,
            rank=rank,
            num_ranks=num_ranks,
            wait_s=wait_s,
            batch_id=batch_id,
            first_micro_batch=num_had,
        )
        responses = [
            each
            async for each in stream_call(
                BatchesStub(self.channel).PullStep, request, timeout_s=DEADLINE_S
            )
        ]
        first = responses[0]
        if first.HasField("wait"):
            return str(first.wait.reason)
        if first.HasField("end"):
            return None
        rows = [micro_batch_from_proto(each.micro_batch) for each in responses[1:]]
        plan = plan_from_proto(first.plan)
        assert len(rows) == plan.num_micro_batches - (num_had if plan.batch_id == batch_id else 0)
        return Pulled(plan, rows)

    async def pull_grown(self, step: int, rank: int = 0, num_ranks: int = 1) -> Pulled:
        """A whole batch of a streaming policy, in as many pulls as it takes."""
        pulled = await self.pull(step, rank, num_ranks)
        rows = list(pulled.rows)
        while pulled.plan.provisional:
            more = await self.pull_once(
                step, rank, num_ranks, batch_id=pulled.plan.batch_id, num_had=len(rows)
            )
            assert isinstance(more, Pulled), more
            pulled = more
            rows += more.rows
        return Pulled(pulled.plan, rows)

    async def may_publish(self, version: int, wait_s: float = 0.0) -> bool:
        request = bpb.WaitPublishableRequest(policy_version=version, wait_s=wait_s)
        return (
            await call(BatchesStub(self.channel).WaitPublishable, request, timeout_s=DEADLINE_S)
        ).allowed

    async def pull(self, step: int, rank: int = 0, num_ranks: int = 1) -> Pulled:
        pulled = await self.pull_once(step, rank, num_ranks)
        assert isinstance(pulled, Pulled), pulled
        return pulled

    async def commit(self, step: int, group_ids: Sequence[str], *, last: bool = False) -> None:
        request = bpb.CommitStepRequest(step=step, batch_id="", group_ids=group_ids, last=last)
        await call(BatchesStub(self.channel).CommitStep, request, timeout_s=DEADLINE_S)

    async def train(self, step: int) -> Pulled:
        """One step: pull, commit, publish the next version."""
        pulled = await self.pull(step)
        await self.commit(step, pulled.plan.group_ids)
        await self.mark_published(step + 1)
        return pulled

    async def snapshot(self, step: int) -> bpb.LedgerSnapshot:
        request = bpb.GetSnapshotRequest(step=step)
        return (
            await call(BatchesStub(self.channel).GetSnapshot, request, timeout_s=DEADLINE_S)
        ).snapshot

    # Looking inside

    async def metric(self, name: str, at_least: float) -> float:
        return (await self.metrics_with(name, at_least))[name]

    async def metrics_with(self, name: str, at_least: float) -> dict[str, float]:
        """Waits for a metrics record that has `name` at `at_least` or above and returns all its
        values.
        """
        async with asyncio.timeout(DEADLINE_S), self.stream.metrics() as records:
            async for record in records:
                if record.values.get(name, -1.0) >= at_least:
                    return dict(record.values)
        raise AssertionError(f"no metric {name}")

    async def unacknowledged(self, expected: int) -> None:
        """Waits until the sample stream holds exactly `expected` messages."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.stream.depth()).num_messages != expected:  # noqa: ASYNC110 - the server sends no notification
                await asyncio.sleep(0.02)


@asynccontextmanager
async def harness(
    tmp_path: Path, *flags: str, started: bool = True, **sections: dict[str, Any]
) -> AsyncIterator[PreprocessorHarness]:
    document = job_document(**sections)
    job_file = tmp_path / "job.yaml"
    job_file.write_text(yaml.safe_dump(document))
    settings = parse_job(document, source="test").spec.stream
    async with (
        NatsServer.start(tmp_path / "nats") as nats,
        connect_stream(nats.url, "test", settings, name="test") as stream,
    ):
        made = PreprocessorHarness(job_file, tmp_path / "output", nats, stream)
        if started:
            await made.start(*flags)
        try:
            yield made
        except BaseException:
            print("\n".join(made.log_lines[-40:]))  # noqa: T201 - pytest shows it with the failure
            raise
        finally:
            if made.process is not None:
                await made.stop(signal.SIGKILL)
