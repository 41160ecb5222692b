"""On a real cluster: jobs that are refused, that end, that share a namespace, and namespaces that
are deleted.
"""

import re
from collections.abc import Callable

import pytest

from cluster_job import ClusterJob
from cluster_session import Cluster, wait_for

ARITHMETIC_TASK = "pipelinerl_actor.tasks.arithmetic:Arithmetic"

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def namespace(new_namespace: Callable[[str], str]) -> str:
    return new_namespace("jobs")


@pytest.fixture(scope="module")
def pair(namespace: str, new_job: Callable[..., ClusterJob]) -> tuple[ClusterJob, ClusterJob]:
    """Two short jobs that run concurrently. The first one trains adapters and is evaluated; the
    second one deletes itself.
    """
    held_out = {"name": "held-out", "path": ARITHMETIC_TASK, "numPrompts": 8, "args": {"digits": 1}}
    evaluation = {"everySteps": 5, "sets": [held_out], "timeoutSeconds": 300}
    adapted = {"adapter": {"rank": 4, "alpha": 8}}
    kept = new_job(
        "kept", namespace, steps=3, cleanPodPolicy="None", model=adapted, evaluation=evaluation
    )
    gone = new_job("gone", namespace, steps=3, ttlSecondsAfterFinished=20)
    return kept.apply(), gone.apply()


def test_a_spec_that_contradicts_itself_is_refused_in_words_and_creates_nothing(
    namespace: str, new_job: Callable[..., ClusterJob]
) -> None:
    job = new_job("contradiction", namespace, trainers={"microBatchTokens": 16}).apply()
    job.wait_for_phase("Invalid", timeout_s=60)
    condition = job.condition("Provisioned")
    assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec")
    assert (
        "trainers.microBatchTokens=16 cannot hold one trajectory of model.maxModelLen=64 tokens"
        in condition["message"]
    )
    assert "InvalidSpec" in job.events()
    assert job.pods() == []
    job.delete()


def test_a_spec_of_the_wrong_shape_is_refused_by_the_server(
    namespace: str, new_job: Callable[..., ClusterJob]
) -> None:
    job = new_job("shape", namespace, actors={"replicas": "many"})
    with pytest.raises(AssertionError, match=r"spec\.actors\.replicas"):
        job.apply()
    assert job.object is None


def test_a_pod_template_that_the_server_refuses_is_told_in_its_words(
    namespace: str, new_job: Callable[..., ClusterJob]
) -> None:
    template = {
        "spec": {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "-1"}}}]}
    }
    job = new_job("template", namespace, trainers={"podTemplate": template}).apply()
    job.wait_for_phase("Invalid", timeout_s=60)
    condition = job.condition("Provisioned")
    assert (condition["status"], condition["reason"]) == ("False", "PodRefused")
    assert "must be greater than or equal to 0" in condition["message"]
    assert job.pods() == []
    job.patch(trainers={"podTemplate": None})
    wait_for("pods of the fixed job", lambda: len(job.pods()) == 3, 90, lambda: job.status)
    job.delete()


def test_two_jobs_in_one_namespace_both_succeed(pair: tuple[ClusterJob, ClusterJob]) -> None:
    kept, gone = pair

    def ended() -> bool:
        return all(job.object is None or job.phase == "Succeeded" for job in pair)

    wait_for("end of both", ended, 400, lambda: [job.status for job in pair])
    assert kept.phase == "Succeeded"
    assert kept.status["training"]["step"] == 3
    assert kept.status["restarts"] == 0
    assert gone.object is None or gone.phase == "Succeeded"


def test_the_last_step_of_a_job_with_adapters_is_evaluated(
    pair: tuple[ClusterJob, ClusterJob],
) -> None:
    """Runs after `test_two_jobs_in_one_namespace_both_succeed`."""
    kept, _ = pair
    (evaluator,) = kept.pods("evaluator")
    assert evaluator["status"]["phase"] == "Succeeded"
    assert kept.condition("Evaluating")["status"] == "False"
    events = kept.events()
    assert {"Evaluating", "Evaluated", "Succeeded"} <= set(events)
    assert re.fullmatch(r"step 3: held-out pass@1 \S.*", events["Evaluated"][0]), events[
        "Evaluated"
    ]


def test_a_finished_job_is_removed_after_its_time_and_another_one_stays(
    pair: tuple[ClusterJob, ClusterJob],
) -> None:
    kept, gone = pair
    wait_for("removal", lambda: gone.object is None and not gone.pods(), 400, lambda: gone.status)
    assert kept.phase == "Succeeded"
    assert {pod["status"]["phase"] for pod in kept.pods("trainer")} == {"Succeeded"}


def test_a_namespace_goes_with_its_jobs(
    cluster: Cluster, new_namespace: Callable[[str], str], new_job: Callable[..., ClusterJob]
) -> None:
    namespace = new_namespace("leaving")
    job = new_job("leaving", namespace).apply()
    wait_for("pods", job.pods, 90, lambda: job.status)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    wait_for("end of the namespace", lambda: cluster.get("namespace", namespace) is None, 180)
