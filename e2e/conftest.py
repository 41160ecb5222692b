"""Fixtures of the tests that run `pipelinerl up`, and of those that run on a cluster."""

import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import cluster_session
from cluster_job import ClusterJob, claim, namespace_object, small_job
from cluster_release import Release
from cluster_session import CannotRun, Cluster
from up_run import ARITHMETIC, Run

CLUSTER = pytest.StashKey[Cluster]()


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs in the test's folder; ends their processes afterwards."""
    runs: list[Run] = []

    def make(name: str, *arguments: str, job: Path = ARITHMETIC) -> Run:
        run = Run(tmp_path / name, arguments, job)
        runs.append(run)
        return run

    yield make
    for run in runs:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.wait(30)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the cluster come last: it is started once, and nothing is measured beside it."""
    items.sort(key=lambda item: item.get_closest_marker("cluster") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """A failure on the cluster comes with its objects, events and logs."""
    report = yield
    cluster = item.config.stash.get(CLUSTER, None)
    if report.failed and cluster is not None and item.get_closest_marker("cluster") is not None:
        report.sections.append(("cluster", cluster_session.diagnosis(cluster)))
    return report


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The cluster of KUBECONFIG, or the local one, for the whole session. In CI the local one must
    start.
    """
    try:
        existing = cluster_session.existing()
        found = existing or cluster_session.bring_up()
    except CannotRun as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    pytestconfig.stash[CLUSTER] = found
    yield found
    del pytestconfig.stash[CLUSTER]
    if existing is None:
        cluster_session.take_down()


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Iterator[Release]:
    """The chart, installed once."""
    release = Release(cluster)
    release.clear()
    try:
        release.install()
        yield release
    finally:
        release.uninstall()


@pytest.fixture(scope="module")
def new_namespace(cluster: Cluster, release: Release) -> Iterator[Callable[[str], str]]:
    """Makes namespaces with storage for jobs, and deletes them without waiting."""
    made: list[str] = []

    def make(name: str) -> str:
        namespace = f"pipelinerl-e2e-{name}"
        cluster.kubectl(
            "create", "--filename", "-", stdin=json.dumps(namespace_object(namespace))
        )  # fails where the namespace exists already
        made.append(namespace)
        for each in ("cache", "checkpoints"):
            claim(cluster, namespace, each)
        return namespace

    yield make
    if made:
        cluster.kubectl("delete", "namespace", *made, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def new_job(cluster: Cluster, new_namespace: Callable[[str], str]) -> Callable[..., ClusterJob]:
    """Makes small jobs; `new_job("name", namespace, steps=3, ttlSecondsAfterFinished=5)` applies
    nothing yet.
    """

    def make(name: str, namespace: str, **changes: Any) -> ClusterJob:
        return ClusterJob(cluster, namespace, small_job(name, **changes))

    return make
