"""The controller's behaviour on an API server in memory; the bugs of other operators, one test
each.
"""

from typing import Any

import pytest
from operator_fake_api import Fault
from operator_fakes import JOB, FakeCluster, job

from pipelinerl_operator.controller.status import JobPhase, TrainingStatus
from pipelinerl_operator.kube import ObjectKey
from pipelinerl_operator.kube.errors import ApiUnavailable, Conflict, Invalid
from pipelinerl_operator.kube.resources import CONFIG_MAPS, JOBS, PODS, SECRETS, SERVICES

ALL_PODS = {
    "sums-actor-0",
    "sums-actor-1",
    "sums-preprocessor-0",
    "sums-trainer-0",
    "sums-trainer-1",
}


async def running(**spec: Any) -> FakeCluster:
    world = FakeCluster()
    await world.submit(job(**spec))
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    return world


async def finished(**spec: Any) -> FakeCluster:
    world = await running(**spec)
    world.end("sums-trainer-0", "trainer", 0)
    await world.settle()
    assert world.is_in(JobPhase.SUCCEEDED)
    return world


async def test_a_job_gets_its_objects_and_runs() -> None:
    world = await running()
    assert set(world.pods()) == ALL_PODS
    assert world.api.of(SECRETS, "sums-token") is not None
    assert world.api.of(CONFIG_MAPS, "sums-job") is not None
    assert world.api.of(SERVICES, "sums") is not None
    status = world.status
    assert (status.actors.ready, status.trainers.ready, status.preprocessor.ready) == (2, 2, 1)
    assert world.api.objects[JOBS, JOB]["status"]["restarts"] == 0, (
        "zero is reported too: kubectl shows it"
    )
    assert status.holds("Provisioned")
    assert status.holds("Running")
    assert "Running" in world.notes.reasons


async def test_a_quiet_resync_writes_nothing_even_by_a_new_leader() -> None:
    world = await running()
    before = world.num_writes()
    await world.settle()
    world.restart_operator()
    await world.settle()
    assert world.num_writes() == before


async def test_a_new_leader_starts_the_coordinator_at_its_first_look_though_nothing_changes() -> (
    None
):
    world = await running()
    world.restart_operator()
    await world.look()
    assert world.runtimes.tokens[JOB]


async def test_status_takes_one_write_until_the_job_runs() -> None:
    world = await running()
    assert [
        call.verb for call in world.api.writes if call.resource == JOBS and call.verb != "create"
    ] == ["status"]


async def test_training_that_ends_well_ends_the_job_and_its_other_pods() -> None:
    world = await finished()
    assert set(world.pods()) == {"sums-trainer-0"}
    assert world.status.completion_time is not None
    assert world.violations == []


@pytest.mark.parametrize(("policy", "left"), [("All", set[str]()), ("None", ALL_PODS)])
async def test_clean_pod_policy_decides_what_stays(policy: str, left: set[str]) -> None:
    world = await finished(cleanPodPolicy=policy)
    assert set(world.pods()) == left


async def test_terminal_state_is_written_before_anything_is_cleaned_up() -> None:
    world = await running()
    world.end("sums-trainer-0", "trainer", 0)
    world.sync()
    before = world.num_writes()
    await world.look()
    assert [(call.verb, call.resource) for call in world.api.writes[before:]] == [("status", JOBS)]


async def test_the_end_is_told_by_what_the_trainer_left_and_not_by_what_was_read_of_it_last() -> (
    None
):
    world = await running()
    world.trainings[JOB] = TrainingStatus(
        step=31, policy_version=31, reward=0.5, samples_per_second=12.0
    )
    message = (
        "pipelinerl_policy_version 60.0\npipelinerl_reward_mean 0.875\npipelinerl_lag_mean "
        "1.5\npipelinerl_ess 1e-05\n"
    )
    world.end("sums-trainer-0", "trainer", 0, message=message)
    await world.settle()
    expected = TrainingStatus(
        step=60, policy_version=60, reward=0.875, lag=1.5, ess=1e-05, samples_per_second=12.0
    )
    assert world.status.training == expected


async def test_a_trainer_that_leaves_nothing_is_told_by_what_was_read_of_it_last() -> None:
    world = await running()
    world.trainings[JOB] = TrainingStatus(step=31, policy_version=31)
    world.end("sums-trainer-0", "trainer", 0)
    await world.settle()
    assert world.status.training == TrainingStatus(step=31, policy_version=31)


async def test_a_finished_job_is_not_run_again_by_anything() -> None:
    """Other operators recreate a completed job again and again, or rerun a failed one."""
    world = await finished()
    world.api.remove(PODS, ObjectKey("default", "sums-trainer-0"), 0)
    world.change(restart={"id": "again"})
    world.change(suspend=True)
    world.change(suspend=False)
    world.restart_operator()
    await world.settle()
    assert world.pods() == {}
    assert world.is_in(JobPhase.SUCCEEDED)
    assert world.violations == []


async def test_ttl_deletes_the_job_after_its_time_and_it_stays_away() -> None:
    world = await running(ttlSecondsAfterFinished=100)
    world.end("sums-trainer-0", "trainer", 0)
    await world.settle()
    assert world.api.of(JOBS, "sums") is not None
    world.now += 100
    await world.settle()
    assert world.api.objects == {}


async def test_an_actor_that_fails_is_started_again_alone() -> None:
    world = await running()
    uids = {name: pod["metadata"]["uid"] for name, pod in world.pods().items()}
    world.end("sums-actor-1", "generator-0", 1)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.attempts() == {name: int(name == "sums-actor-1") for name in ALL_PODS}
    assert {name for name, pod in world.pods().items() if pod["metadata"]["uid"] != uids[name]} == {
        "sums-actor-1"
    }
    last = world.status.actors.last_failure
    assert last is not None
    assert (last.pod, last.reason, last.exit_code, world.status.actors.restarts) == (
        "sums-actor-1",
        "Error",
        1,
        1,
    )


async def test_a_dead_container_of_a_pod_that_kubernetes_calls_running_is_a_failure() -> None:
    world = await running()
    world.end("sums-actor-0", "generator-0", 1, phase="Running")
    await world.settle()
    assert world.attempts()["sums-actor-0"] == 1


async def test_a_sidecar_that_ends_is_not() -> None:
    world = await running()
    world.end("sums-actor-0", "log-shipper", 1, phase="Running")
    await world.settle()
    assert world.attempts()["sums-actor-0"] == 0


async def test_a_trainer_that_fails_restarts_all_trainers_and_no_actor() -> None:
    world = await running()
    world.end("sums-trainer-1", "trainer", 1)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.attempts() == {name: int("trainer" in name) for name in ALL_PODS}
    assert world.status.restarts == 1
    assert world.violations == []


async def test_a_trainer_whose_pod_vanished_unseen_restarts_all_trainers() -> None:
    """Restart missed because the child came back first."""
    world = await running()
    world.api.remove(PODS, ObjectKey("default", "sums-trainer-1"), 0)
    await world.settle()
    assert world.attempts()["sums-trainer-0"] == world.attempts()["sums-trainer-1"] == 1


async def test_an_actor_that_vanished_at_once_is_counted_and_started_again_alone() -> None:
    world = await running(failurePolicy={"maxRestarts": 0, "backoff": {"initialSeconds": 0}})
    world.api.remove(PODS, ObjectKey("default", "sums-actor-1"), 0)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.attempts() == {name: int(name == "sums-actor-1") for name in ALL_PODS}
    assert (world.status.restarts, world.status.actors.restarts) == (1, 1)
    assert world.status.actors.last_failure is not None
    assert (world.status.actors.last_failure.reason, world.status.actors.last_failure.message) == (
        "Deleted",
        "the pod is gone",
    )


async def test_an_actor_that_vanished_is_counted_though_the_status_could_not_be_written_at_once() -> (  # noqa: E501
    None
):
    world = await running()
    world.api.remove(PODS, ObjectKey("default", "sums-actor-1"), 0)
    world.api.fault = lambda call: Fault(Conflict("no")) if call.verb == "status" else None
    world.sync()
    await world.look()
    assert world.status.restarts == 0
    world.api.fault = lambda call: None
    await world.settle()
    assert world.status.restarts == 1


async def test_pods_that_the_operator_removes_are_no_failures() -> None:
    world = await running()
    world.change(actors={"replicas": 1, "minReplicas": 1})
    await world.settle()
    world.change(actors={"replicas": 2, "minReplicas": 1})
    await world.settle()
    world.change(suspend=True)
    await world.settle()
    world.change(suspend=False)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert (world.status.restarts, set(world.attempts().values())) == (0, {0})


async def test_a_preempted_pod_is_seen_though_status_said_running() -> None:
    world = await running()
    world.api.remove(PODS, ObjectKey("default", "sums-trainer-0"))
    world.sync()
    await world.look()
    world.now += 5
    world.sync()
    await world.look()
    assert world.is_in(JobPhase.RECOVERING)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)


@pytest.mark.parametrize("pod_reason", ["Evicted", "NodeLost", "Preempting"])
async def test_what_the_cluster_does_costs_no_restart(pod_reason: str) -> None:
    world = await running(failurePolicy={"maxRestarts": 0, "backoff": {"initialSeconds": 0}})
    for _ in range(3):
        world.end("sums-actor-0", "rollout", 137, pod_reason=pod_reason)
        await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.attempts()["sums-actor-0"] == 3


async def test_memory_is_told_apart_and_costs_no_restart() -> None:
    world = await running(failurePolicy={"maxRestarts": 0, "backoff": {"initialSeconds": 0}})
    world.end("sums-actor-0", "generator-0", 137, reason="OOMKilled")
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.status.actors.last_failure is not None
    assert world.status.actors.last_failure.reason == "OOMKilled"


async def test_restarts_that_count_are_limited() -> None:
    world = await running(failurePolicy={"maxRestarts": 2, "backoff": {"initialSeconds": 0}})
    for _ in range(3):
        world.end("sums-actor-0", "rollout", 1)
        await world.settle()
    assert world.is_in(JobPhase.FAILED)
    failed = world.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "RestartLimitExceeded"
    assert "used up: 2 restarts within 3600 s" in failed.message


async def test_old_restarts_are_forgotten() -> None:
    world = await running(
        failurePolicy={"maxRestarts": 1, "windowSeconds": 600, "backoff": {"initialSeconds": 0}}
    )
    for _ in range(4):
        world.end("sums-actor-0", "rollout", 1)
        await world.settle()
        world.now += 600
    assert world.is_in(JobPhase.RUNNING)


async def test_wrong_settings_fail_the_job_at_once() -> None:
    world = await running()
    world.end("sums-trainer-0", "trainer", 2)
    await world.settle()
    assert world.is_in(JobPhase.FAILED)
    assert "WrongSettings" in world.notes.reasons


async def test_rules_go_before_defaults() -> None:
    rules = [
        {"action": "FailJob", "role": "actor", "exitCodes": [7]},
        {"action": "RestartUncounted", "reasons": ["Error"]},
    ]
    world = await running(
        failurePolicy={"maxRestarts": 0, "rules": rules, "backoff": {"initialSeconds": 0}}
    )
    world.end("sums-trainer-0", "trainer", 7)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    world.end("sums-actor-0", "rollout", 7)
    await world.settle()
    assert world.is_in(JobPhase.FAILED)


async def test_a_restart_waits_twice_as_long_each_time() -> None:
    world = await running(failurePolicy={"backoff": {"initialSeconds": 10, "maxSeconds": 300}})
    for wait_s in (10, 20):
        world.end("sums-actor-0", "rollout", 1)
        world.sync()
        await world.look()
        failed_at = world.now
        while world.pods().get("sums-actor-0", {}).get("status", {}).get("phase") != "Running":
            world.sync()
            await world.look()
            world.run_pods()
            world.now += 1
            assert world.now - failed_at < 60
        assert world.now - failed_at == pytest.approx(wait_s, abs=2)


async def test_suspend_is_atomic_and_resume_goes_on() -> None:
    """Resume rejected because of immutable fields; unsuspend that never arrives; suspended job
    shown as created.
    """
    world = await running()
    world.change(suspend=True)
    world.sync()
    await world.look()
    assert world.is_in(JobPhase.SUSPENDING)
    world.change(suspend=False)
    world.sync()
    await world.look()
    assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods().values())
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.notes.reasons.count("Suspended") == world.notes.reasons.count("Resumed") == 1
    assert world.status.restarts == 0


async def test_a_job_that_is_made_suspended_gets_no_pod_and_says_so() -> None:
    world = FakeCluster()
    await world.submit(job(suspend=True))
    await world.settle()
    assert world.pods() == {}
    assert world.is_in(JobPhase.SUSPENDED)
    assert not world.status.holds("Provisioned")
    world.change(suspend=False)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)


async def test_a_new_restart_id_restarts_everything_once() -> None:
    world = await running()
    world.change(restart={"id": "one"})
    await world.settle()
    assert set(world.attempts().values()) == {1}
    await world.settle()
    assert set(world.attempts().values()) == {1}


async def test_rapid_edits_restart_nothing() -> None:
    world = await running()
    uids = {pod["metadata"]["uid"] for pod in world.pods().values()}
    for steps in range(5):
        world.change(algorithm={"steps": 10 + steps})
        world.sync()
        await world.look()
    await world.settle()
    assert {pod["metadata"]["uid"] for pod in world.pods().values()} == uids
    assert world.status.trainers.drifted == 2


async def test_scaling_moves_actors_only() -> None:
    world = await running()
    trainers = {pod["metadata"]["uid"] for name, pod in world.pods().items() if "trainer" in name}
    world.change(actors={"replicas": 3, "minReplicas": 1})
    await world.settle()
    assert {"sums-actor-2"} == set(world.pods()) - ALL_PODS
    world.change(actors={"replicas": 1, "minReplicas": 1})
    await world.settle()
    assert set(world.pods()) == ALL_PODS - {"sums-actor-1"}
    assert trainers == {
        pod["metadata"]["uid"] for name, pod in world.pods().items() if "trainer" in name
    }


async def test_an_invalid_spec_creates_nothing_and_is_explained() -> None:
    world = FakeCluster()
    await world.submit(job(actors={"replicas": 1, "minReplicas": 2}))
    await world.settle()
    assert {resource for resource, _ in world.api.objects} == {JOBS}
    assert world.is_in(JobPhase.INVALID)
    condition = world.status.condition("Provisioned")
    assert condition is not None
    assert condition.reason == "InvalidSpec"
    assert "actors.minReplicas=2 is more than actors.replicas=1" in condition.message
    world.change(actors={"replicas": 2})
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)


async def test_an_invalid_edit_leaves_what_runs_alone() -> None:
    world = await running()
    world.change(actors={"replicas": 0})
    await world.settle()
    assert set(world.pods()) == ALL_PODS
    assert world.is_in(JobPhase.RUNNING)
    assert world.status.holds("Degraded")


async def test_fields_of_a_newer_crd_are_left_out_and_named() -> None:
    world = await running()
    world.api.edit(JOBS, JOB, lambda body: body["spec"].update(colour="red"), spec=True)
    world.api.edit(JOBS, JOB, lambda body: body["spec"]["trainers"].update(hats=2), spec=True)
    world.restart_operator()  # an older one, after a rollback of the chart
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert set(world.attempts().values()) == {0}
    assert world.runtimes.tokens[JOB] is not None  # coordinated
    condition = world.status.condition("Understood")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "UnknownFields")
    assert condition.message.endswith("CRD: spec.trainers.hats, spec.colour")
    assert world.notes.reasons.count("UnknownFields") == 1
    world.api.edit(JOBS, JOB, lambda body: body["spec"].pop("colour"), spec=True)
    world.api.edit(JOBS, JOB, lambda body: body["spec"]["trainers"].pop("hats"), spec=True)
    await world.settle()
    assert world.status.holds("Understood")


async def test_a_condition_of_a_newer_operator_is_passed_on() -> None:
    world = await running()
    newer = {
        "type": "Newer",
        "status": "True",
        "reason": "Because",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    world.api.edit(JOBS, JOB, lambda body: body["status"]["conditions"].append(newer))
    world.end("sums-actor-0", "rollout", 1)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.status.holds("Newer")


async def test_a_template_that_the_server_refuses_creates_nothing_and_is_explained() -> None:
    """Status empty when the first child fails to create."""
    world = FakeCluster()
    creation = world.api.before_create

    def refuse(call: object) -> None:
        if getattr(call, "resource", None) == PODS:
            raise Invalid("Pod is invalid: spec.nodeSelector: too odd")

    world.api.before_create = refuse
    await world.submit(
        job(preprocessor={"podTemplate": {"spec": {"nodeSelector": {"odd": "yes"}}}})
    )
    await world.settle(rounds=40)
    assert {resource for resource, _ in world.api.objects} == {JOBS}
    condition = world.status.condition("Provisioned")
    assert condition is not None
    assert condition.reason == "PodRefused"
    assert "too odd" in condition.message
    assert world.is_in(JobPhase.INVALID)
    world.api.before_create = creation
    world.now += 60
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)


async def test_nothing_is_created_in_a_namespace_that_is_going_and_nothing_holds_it() -> None:
    """A finalizer that blocks namespace deletion."""
    world = FakeCluster()
    world.api.terminating.add("default")
    world.api.terminating.discard("default")
    await world.submit()
    world.api.terminating.add("default")
    await world.settle(rounds=200)
    assert {resource for resource, _ in world.api.objects} == {JOBS}
    assert "finalizers" not in world.api.objects[JOBS, JOB]["metadata"]


async def test_a_stale_cache_makes_no_pod_twice_and_counts_no_failure_twice() -> None:
    world = await running()
    world.end("sums-actor-0", "rollout", 1)
    world.sync([PODS])
    for _ in range(5):
        await world.look()
        world.now += 1
    await world.settle()
    assert world.status.restarts == 1
    assert world.attempts()["sums-actor-0"] == 1


async def test_pods_of_a_predecessor_of_the_same_name_are_not_taken_for_its_own() -> None:
    world = await running()
    orphan = world.api.objects[PODS, ObjectKey("default", "sums-actor-0")]
    world.api.remove(JOBS, JOB)
    world.api.objects[PODS, ObjectKey("default", "sums-actor-0")] = orphan
    await world.submit()
    await world.settle()
    assert world.status.actors.created == 1
    world.api.remove(PODS, ObjectKey("default", "sums-actor-0"), 0)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)


async def test_a_foreign_object_of_the_same_name_is_left_alone_and_named() -> None:
    world = FakeCluster()
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "sums"},
        "spec": {"ports": [{"port": 80}]},
    }
    await world.api.create(SERVICES, "default", foreign)
    await world.submit()
    await world.settle(rounds=40)
    assert world.pods() == {}
    found = world.api.of(SERVICES, "sums")
    assert found is not None
    assert found["spec"] == {"ports": [{"port": 80}]}
    condition = world.status.condition("Provisioned")
    assert condition is not None
    assert "Service sums exists already and is not this job's" in condition.message


async def test_a_pod_that_never_stops_terminating_is_removed_by_force() -> None:
    policy = {"terminatingPodTimeoutSeconds": 100, "backoff": {"initialSeconds": 0}}
    world = await running(failurePolicy=policy)
    world.api.remove(PODS, ObjectKey("default", "sums-actor-0"))
    for _ in range(20):
        world.sync()
        await world.look()
        world.now += 10
        if "PodRemovedByForce" in world.notes.reasons:
            break
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert "PodRemovedByForce" in world.notes.reasons


@pytest.mark.parametrize("field", ["activeDeadlineSeconds", "preRunningDeadlineSeconds"])
async def test_deadlines_end_the_job(field: str) -> None:
    world = FakeCluster()
    spec: dict[str, Any] = {field: 100}
    await world.submit(job(**spec))
    await world.settle(kubelet=False)
    assert world.is_in(JobPhase.PENDING)
    world.now += 100
    await world.settle(kubelet=False)
    assert world.is_in(JobPhase.FAILED)
    assert world.pods() == {}


async def test_the_pre_running_deadline_ends_once_the_job_has_run() -> None:
    world = await running(preRunningDeadlineSeconds=100)
    world.now += 1000
    world.end("sums-actor-0", "rollout", 1)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)


async def test_a_job_managed_by_another_is_left_alone() -> None:
    world = FakeCluster()
    await world.submit(job(managedBy="kueue.x-k8s.io/multikueue"))
    await world.settle()
    assert {resource for resource, _ in world.api.objects} == {JOBS}
    assert "status" not in world.api.objects[JOBS, JOB]


async def test_a_changed_child_is_put_right() -> None:
    world = await running()
    key = ObjectKey("default", "sums")
    world.api.edit(SERVICES, key, lambda body: body.update(spec={"ports": []}), spec=True)
    await world.settle()
    assert world.api.objects[SERVICES, key]["spec"]["clusterIP"] == "None"


async def test_a_gang_is_given_up_with_its_pods() -> None:
    world = await running(scheduling={"gang": {"backend": "volcano"}})
    groups = [key for resource, key in world.api.objects if resource.plural == "podgroups"]
    assert groups == [ObjectKey("default", "sums")]
    world.end("sums-trainer-0", "trainer", 0)
    await world.settle()
    assert [key for resource, key in world.api.objects if resource.plural == "podgroups"] == []


@pytest.mark.parametrize("error", [Conflict("409 on status"), ApiUnavailable("500")])
async def test_a_status_that_cannot_be_written_is_written_later_and_nothing_is_done_before(
    error: Exception,
) -> None:
    world = await running()
    world.end("sums-trainer-1", "trainer", 1)
    world.sync()
    before = world.num_writes()
    world.api.fault = lambda call: Fault(error) if call.verb == "status" else None
    await world.look()
    assert world.num_writes() == before
    world.api.fault = lambda call: None
    await world.settle()
    assert world.status.restarts == 1


async def test_an_operator_with_another_image_restarts_nothing() -> None:
    """Operator upgrade restarting every job."""
    from dataclasses import replace

    import operator_fakes as module

    world = await running()
    uids = {pod["metadata"]["uid"] for pod in world.pods().values()}
    old = module.CONTEXT
    module.CONTEXT = replace(old, images={role: "other:2" for role in old.images})
    try:
        world.restart_operator()
        await world.settle()
    finally:
        module.CONTEXT = old
    assert {pod["metadata"]["uid"] for pod in world.pods().values()} == uids
    assert world.status.trainers.drifted == 0
