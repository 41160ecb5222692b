"""On a real cluster: one endless job, and one fault after another.

It must continue training each time, and only what the fault hit may have been restarted.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_job import ClusterJob
from cluster_release import (
    CHART,
    CRD,
    LEADER,
    NAMESPACE,
    NEWER_COLUMN,
    NEWER_FIELD,
    Release,
    older_chart,
)
from cluster_session import Cluster, outage, signal_container, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_long, pytest.mark.timeout(900)]

RECOVERY_S = 180.0


@pytest.fixture(scope="module")
def endless(
    new_namespace: Callable[[str], str], new_job: Callable[..., ClusterJob]
) -> Iterator[ClusterJob]:
    job = new_job("endless", new_namespace("faults")).apply()
    yield job
    job.delete("--wait=false")


@pytest.fixture
def job(endless: ClusterJob) -> ClusterJob:
    """The endless job, training with all its processes."""
    endless.wait_until_training(steps=1)
    wait_for(
        "whole job",
        lambda: endless.condition("Degraded").get("status") != "True",
        RECOVERY_S,
        lambda: endless.status,
    )
    return endless


def container_id(pod: dict[str, Any], container: str) -> str:
    return next(
        str(each["containerID"])
        for each in pod["status"]["containerStatuses"]
        if each["name"] == container
    )


def kill(cluster: Cluster, pod: dict[str, Any], container: str) -> None:
    """kill -9 of a container; on a cluster whose nodes are out of reach, the pod is deleted without
    grace.
    """
    if cluster.is_local:
        signal_container(container_id(pod, container), "KILL")
    else:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        cluster.kubectl(
            "--namespace", namespace, "delete", "pod", name, "--grace-period=0", "--force"
        )


def recovers_from_a_kill(job: ClusterJob, role: str, container: str) -> dict[str, Any]:
    """Kills a container of `role`; returns the role's status once its pod is a new one and training
    has continued.
    """
    before, restarts = job.uids(), job.status["restarts"]
    (pod,) = job.pods(role)
    kill(job.cluster, pod, container)
    wait_for(
        f"new {role}",
        lambda: job.uids(role) and not job.uids(role).items() & before.items(),
        RECOVERY_S,
        lambda: job.status,
    )
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    after = job.uids()
    assert {name for name in before if after.get(name) != before[name]} == set(job.uids(role))
    assert job.status["restarts"] == restarts + 1
    assert any(pod["metadata"]["name"] in message for message in job.events()["PodFailed"])
    field = {"actor": "actors", "trainer": "trainers", "preprocessor": "preprocessor"}[role]
    return dict(job.status[field])


def test_a_killed_actor_is_replaced_alone_and_joins_the_weight_group_again(job: ClusterJob) -> None:
    epoch = job.status["weightGroup"]["epoch"]
    failure = recovers_from_a_kill(job, "actor", "generator-0")["lastFailure"]
    assert (failure["reason"], failure.get("exitCode")) == (
        ("Error", 137) if job.cluster.is_local else ("Deleted", None)
    )
    wait_for(
        "newer group",
        lambda: job.status["weightGroup"]["epoch"] > epoch,
        RECOVERY_S,
        lambda: job.status,
    )
    assert job.condition("WeightGroupReady")["status"] == "True"


def test_a_killed_trainer_goes_on_from_its_checkpoint(job: ClusterJob) -> None:
    step = job.step
    trainers = recovers_from_a_kill(job, "trainer", "trainer")
    assert trainers["restarts"] >= 1
    assert (
        job.step >= step - 5
    )  # checkpoint.everySteps, and the steps that a status of 15 s ago does not show


def test_a_killed_preprocessor_is_replaced_alone(job: ClusterJob) -> None:
    recovers_from_a_kill(job, "preprocessor", "preprocessor")


def test_the_streams_server_may_go_and_come_back(job: ClusterJob, release: Release) -> None:
    before = job.uids()
    (server,) = release.pods("app.kubernetes.io/component=nats")
    name = server["metadata"]["name"]
    job.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", name, "--wait=false")
    wait_for("new server", lambda: release.pods("app.kubernetes.io/component=nats"), 90)
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    assert job.uids() == before


def test_another_replica_takes_over_when_the_leading_operator_dies(
    job: ClusterJob, release: Release
) -> None:
    before, leader = job.uids(), release.leader()
    job.cluster.kubectl(
        "--namespace", NAMESPACE, "delete", "pod", leader, "--grace-period=0", "--force"
    )
    wait_for(
        "another leader",
        lambda: {each["metadata"]["name"] for each in release.pods(LEADER)} - {leader},
        90,
    )
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    assert job.uids() == before


def test_the_api_server_may_be_away_for_twenty_seconds(job: ClusterJob) -> None:
    if not job.cluster.is_local:
        pytest.skip("only the local cluster's API server may be stopped")
    before = job.uids()
    outage("apiserver", 20)
    wait_for("API server", lambda: job.phase, 90)
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    assert job.uids() == before


@pytest.fixture
def second_actor(job: ClusterJob) -> Iterator[dict[str, Any]]:
    """The pod of a second actor, whose generator is a member of the weight group and may be
    stopped.
    """
    if not job.cluster.is_local:
        pytest.skip("only the local cluster's containers may be stopped")
    job.kubectl("scale", "prl", job.name, "--replicas", "2")
    wait_for(
        "two members",
        lambda: job.status["weightGroup"]["numMembers"] == 2,
        RECOVERY_S,
        lambda: job.status,
    )
    wait_for(
        "two ready actors",
        lambda: job.status["actors"]["ready"] == 2,
        RECOVERY_S,
        lambda: job.status,
    )
    yield next(pod for pod in job.pods("actor") if pod["metadata"]["name"].endswith("-1"))
    job.kubectl("scale", "prl", job.name, "--replicas", "1")


def test_a_generator_that_falls_silent_is_left_out_alone_and_comes_back(
    job: ClusterJob, second_actor: dict[str, Any]
) -> None:
    before, restarts = job.uids(), job.status["restarts"]
    generator = container_id(second_actor, "generator-0")
    signal_container(
        generator, "STOP"
    )  # in an update, or before one: it does not respond, and nothing reports its end
    try:
        deadline_s = 20 + RECOVERY_S / 2  # syncTimeoutSeconds, and a status that is up to 15 s old
        wait_for(
            "one member",
            lambda: job.status["weightGroup"]["numMembers"] == 1,
            deadline_s,
            lambda: job.status,
        )
        job.wait_until_training(steps=2, timeout_s=RECOVERY_S / 2)
    finally:
        signal_container(generator, "CONT")
    wait_for(
        "two members",
        lambda: job.status["weightGroup"]["numMembers"] == 2,
        RECOVERY_S,
        lambda: job.status,
    )
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    assert job.uids() == before
    assert job.status["restarts"] == restarts


def test_actors_come_and_go_while_training_runs(job: ClusterJob) -> None:
    wait_for("one actor", lambda: len(job.pods("actor")) == 1, RECOVERY_S, lambda: job.status)
    others = job.uids()
    job.kubectl("scale", "prl", job.name, "--replicas", "2")
    wait_for(
        "two members",
        lambda: job.status["weightGroup"]["numMembers"] == 2,
        RECOVERY_S,
        lambda: job.status,
    )
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    job.kubectl("scale", "prl", job.name, "--replicas", "1")
    wait_for(
        "one member",
        lambda: job.status["weightGroup"]["numMembers"] == 1,
        RECOVERY_S,
        lambda: job.status,
    )
    wait_for("one actor", lambda: len(job.pods("actor")) == 1, RECOVERY_S, lambda: job.status)
    job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
    assert job.uids() == others
    assert (
        job.kubectl("get", "prl", job.name, "--output", "jsonpath={.status.actors.desired}") == "1"
    )


def test_an_upgrade_of_the_chart_replaces_operator_and_crd_and_leaves_running_jobs_alone(
    job: ClusterJob, release: Release, tmp_path: Path
) -> None:
    """From an earlier chart, with another image of the operator, to this one."""
    before, crds = job.uids() | release.uids("nats"), []
    for chart, tag in ((older_chart(tmp_path), release.other_tag()), (CHART, job.cluster.tag)):
        operators = set(release.uids("operator").values())
        release.install(f"operator.image.tag={tag}", chart=chart)
        now = release.pods("app.kubernetes.io/component=operator")
        assert {pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in now} == {tag}
        assert not operators & set(release.uids("operator").values())
        job.wait_until_training(steps=2, timeout_s=RECOVERY_S)
        assert job.uids() | release.uids("nats") == before
        crds.append(json.dumps(job.cluster.get("crd", CRD)))
    assert [[f'"{name}"' in crd for name in (NEWER_FIELD, NEWER_COLUMN)] for crd in crds] == [
        [False, False],
        [True, True],
    ]


def test_a_suspended_job_holds_nothing_and_resumes_where_it_stopped(job: ClusterJob) -> None:
    before, step = job.uids(), job.step
    job.patch(suspend=True)
    job.wait_for_phase("Suspended", timeout_s=120)
    assert job.pods() == []
    assert job.condition("Suspended")["status"] == "True"
    job.patch(suspend=False)
    job.wait_until_training(steps=1)
    assert not job.uids().items() & before.items()
    assert job.step > step
    assert job.condition("Suspended")["status"] == "False"
    assert {"Suspended", "Resumed"} <= set(job.events())


def test_a_job_deleted_in_the_middle_leaves_nothing(job: ClusterJob) -> None:
    """The last test of this file, since it ends the endless job."""
    job.delete("--wait=true")
    kinds = "pods,services,configmaps,secrets,networkpolicies,poddisruptionbudgets,serviceaccounts"
    selector = f"pipelinerl.dev/job={job.name}"

    def left() -> list[str]:
        found = job.cluster.items(kinds, "--namespace", job.namespace, "--selector", selector)
        return [f"{each['kind']}/{each['metadata']['name']}" for each in found]

    wait_for("end of everything", lambda: not left(), 120, left)
    assert job.object is None
