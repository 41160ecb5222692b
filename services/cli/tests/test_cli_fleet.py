"""Actors that come and go: Prometheus' list of targets follows who is there."""

import asyncio
import json
import os
from pathlib import Path

from test_cli_supervisor import DEADLINE_S

from pipelinerl_cli.up import targets
from pipelinerl_cli.up.actors import Fleet
from pipelinerl_cli.up.process import LocalProcess
from pipelinerl_cli.up.supervisor import Supervisor
from pipelinerl_common.settings import Job, parse_job
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.plan import Endpoints, PlannedProcess, process_names


def two_actors() -> Job:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {
            "model": {"uri": "tiny://arithmetic"},
            "task": {"path": "tasks:Sums"},
            "actors": {"replicas": 2, "drainSeconds": 0},
        },
    }
    return parse_job(document, source="test")


async def test_targets_follow_an_actor_that_goes_before_it_was_ready_and_comes_again(
    tmp_path: Path,
) -> None:
    job = two_actors()
    names = process_names(job)
    endpoints = Endpoints(
        job_file=tmp_path / "job.yaml",
        output=tmp_path,
        nats_url="nats://127.0.0.1:1",
        coordinator="127.0.0.1:2",
        addresses={name: f"127.0.0.1:{10 + k}" for k, name in enumerate(names)},
        trainer_master="127.0.0.1:3",
        metrics_addresses={
            name: f"127.0.0.1:{50 + k}" for k, name in enumerate((targets.OWN, *names))
        },
    )
    lists: list[set[str]] = []

    def list_targets(present: Job) -> None:
        listed = json.loads(
            targets.targets_file(present, endpoints.addresses, endpoints.metrics_addresses)
        )
        lists.append({target["labels"]["instance"] for target in listed})

    processes: list[LocalProcess] = []

    async def launch(workload: PlannedProcess) -> LocalProcess:
        log_file = tmp_path / f"{workload.name}.log"
        process = await LocalProcess.start(
            workload.name, ("sleep", "600"), log_file=log_file, environment=dict(os.environ)
        )
        processes.append(process)
        return process

    fleet = Fleet(job, endpoints, 2, list_targets)
    coordinator = Coordinator(
        job.spec.weight_transfer, fleet.generator_urls, lambda: None, token=None
    )
    supervisor = Supervisor(fleet.planned(), launch, lambda: False, on_restart=lambda name: None)
    task = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert fleet.ready(supervisor, coordinator) == frozenset(), (
                "no generator has joined a group"
            )
            await fleet.resize(1, supervisor, coordinator)
            everything = {targets.OWN, *names}
            assert lists == [everything - {"actor-1", "generator-1-0"}]
            await fleet.resize(2, supervisor, coordinator)
            assert lists[1:] == [everything]
            await fleet.resize(2, supervisor, coordinator)
            assert len(lists) == 2, "no actor was added or removed"
    finally:
        supervisor.kill()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(process.wait() for process in processes))
        await coordinator.close()
