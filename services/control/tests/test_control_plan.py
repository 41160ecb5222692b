from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelinerl_common.settings import Job, parse_job
from pipelinerl_control.plan import (
    Endpoints,
    PlannedProcess,
    RestartScope,
    Role,
    num_gpus,
    plan,
    process_names,
)


def make_job(**spec: Any) -> Job:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {"model": {"uri": "tiny://arithmetic"}, "task": {"path": "tasks:Sums"}, **spec},
    }
    return parse_job(document, source="test")


def make_endpoints(job: Job) -> Endpoints:
    return Endpoints(
        job_file=Path("/run/job.yaml"),
        output=Path("/run"),
        nats_url="nats://127.0.0.1:4222",
        coordinator="127.0.0.1:4000",
        addresses={
            name: f"127.0.0.1:{5000 + number}" for number, name in enumerate(process_names(job))
        },
        trainer_master="127.0.0.1:4001",
        token_file=Path("/run/token"),
    )


def workloads(job: Job) -> dict[str, PlannedProcess]:
    return {workload.name: workload for workload in plan(job, make_endpoints(job))}


def values(workload: PlannedProcess, flag: str) -> list[str]:
    return [workload.argv[at + 1] for at, part in enumerate(workload.argv) if part == flag]


def test_smallest_job_has_one_process_of_each_role() -> None:
    assert list(workloads(make_job())) == [
        "preprocessor-0",
        "generator-0-0",
        "trainer-0",
        "actor-0",
    ]


def test_names_count_generators_per_actor_and_ranks_over_nodes() -> None:
    job = make_job(
        actors={"replicas": 2, "generatorsPerReplica": 2},
        trainers={"replicas": 2, "processesPerNode": 2},
    )
    assert process_names(job) == (
        "preprocessor-0",
        *("generator-0-0", "generator-0-1", "generator-1-0", "generator-1-1"),
        *("trainer-0", "trainer-1", "trainer-2", "trainer-3"),
        *("actor-0", "actor-1"),
    )


def test_actor_routes_only_to_its_own_generators() -> None:
    planned = workloads(make_job(actors={"replicas": 2, "generatorsPerReplica": 2}))
    own = [f"http://{planned[name].address}" for name in ("generator-1-0", "generator-1-1")]
    assert values(planned["actor-1"], "--generator") == own


def test_trainer_gets_the_generators_of_the_actor_that_always_exists_and_its_place_among_the_ranks() -> (  # noqa: E501
    None
):
    planned = workloads(
        make_job(
            actors={"replicas": 2, "generatorsPerReplica": 2}, trainers={"processesPerNode": 2}
        )
    )
    trainer = planned["trainer-1"]
    assert values(trainer, "--generator") == [
        f"http://{planned[n].address}" for n in ("generator-0-0", "generator-0-1")
    ]
    assert values(trainer, "--rank") == ["1"]
    assert values(trainer, "--num-ranks") == ["2"]
    assert values(trainer, "--master-address") == ["127.0.0.1"]
    assert values(trainer, "--master-port") == ["4001"]
    assert "--resume" in trainer.argv


def test_references_serve_the_initial_weights_and_only_the_preprocessor_knows_them() -> None:
    planned = workloads(make_job(reference={"replicas": 2}, algorithm={"kl": {"coefficient": 0.1}}))
    assert "--serve-initial" in planned["reference-1"].argv
    assert "--serve-initial" not in planned["generator-0-0"].argv
    addresses = [f"http://{planned[name].address}" for name in ("reference-0", "reference-1")]
    assert values(planned["preprocessor-0"], "--reference") == addresses
    assert not any("--reference" in planned[name].argv for name in ("actor-0", "trainer-0"))
    assert values(planned["trainer-0"], "--generator") == [
        f"http://{planned['generator-0-0'].address}"
    ]


def test_every_process_is_wired_to_the_shared_endpoints() -> None:
    for workload in workloads(make_job()).values():
        assert workload.argv[:2] == ("python", "-m")
        assert values(workload, "--name") == [workload.name]
        assert values(workload, "--listen") == [workload.address]
        assert values(workload, "--preprocessor") == ["127.0.0.1:5000"]
        assert values(workload, "--coordinator") == ["127.0.0.1:4000"]
        assert values(workload, "--nats-url") == ["nats://127.0.0.1:4222"]
        assert values(workload, "--token-file") == ["/run/token"]


def test_metrics_are_served_where_the_runtime_says() -> None:
    job = make_job()
    endpoints = replace(make_endpoints(job), metrics_addresses={"trainer-0": "127.0.0.1:9090"})
    served = {
        workload.name: values(workload, "--metrics-listen") for workload in plan(job, endpoints)
    }
    assert served == {
        "preprocessor-0": [],
        "generator-0-0": [],
        "trainer-0": ["127.0.0.1:9090"],
        "actor-0": [],
    }


def test_trainers_restart_together_and_the_rest_alone() -> None:
    scopes = {workload.role: workload.restart_scope for workload in workloads(make_job()).values()}
    assert scopes.pop(Role.TRAINER) is RestartScope.ROLE
    assert set(scopes.values()) == {RestartScope.ALONE}


def test_port_is_that_of_the_address() -> None:
    assert [workload.port for workload in workloads(make_job()).values()] == [
        5000,
        5001,
        5002,
        5003,
    ]


def test_missing_address_is_named() -> None:
    job = make_job()
    endpoints = make_endpoints(job)
    incomplete = {
        name: address for name, address in endpoints.addresses.items() if name != "trainer-0"
    }
    with pytest.raises(ValueError, match="no address for trainer-0"):
        plan(job, replace(endpoints, addresses=incomplete))


def test_gpus_are_those_of_the_job_and_none_on_a_cpu() -> None:
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}}
    job = make_job(
        actors={
            "gpusPerReplica": 8,
            "generatorsPerReplica": 4,
            "generator": {"tensorParallelSize": 2},
        },
        trainers={"processesPerNode": 2},
        reference={"generator": {"tensorParallelSize": 2}},
        **kl,
    )
    names = ("generator-0-3", "reference-0", "trainer-1", "actor-0", "preprocessor-0")
    assert [num_gpus(job, name) for name in names] == [2, 2, 1, 0, 0]
    on_cpu = make_job(reference={}, **kl)
    assert {num_gpus(on_cpu, name) for name in process_names(on_cpu)} == {0}
    assert num_gpus(make_job(reference={"gpusPerReplica": 1}, **kl), "reference-0") == 1


def test_services_bind_the_host_of_their_role_where_one_is_given() -> None:
    job = make_job()
    endpoints = replace(make_endpoints(job), listen_hosts={Role.GENERATOR: "0.0.0.0"})
    planned = {workload.name: workload for workload in plan(job, endpoints)}
    assert values(planned["generator-0-0"], "--listen") == ["0.0.0.0:5001"]
    assert planned["generator-0-0"].address == "127.0.0.1:5001"
    assert values(planned["trainer-0"], "--listen") == ["127.0.0.1:5002"]
