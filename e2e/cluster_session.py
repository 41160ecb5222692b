"""The cluster that tests run on: an existing one through KUBECONFIG, or the one of e2e/cluster,
started for the session.

README.md in e2e/cluster says what an existing one must have. Every wait has a deadline, and its
error contains the last state that it saw.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "e2e" / "cluster"
BINARIES = (
    Path(os.environ.get("CLUSTER_CACHE", Path.home() / ".cache" / "local-kubernetes")) / "bin"
)
STATE = Path(os.environ.get("CLUSTER_DIR", "/var/lib/local-kubernetes"))
POLL_S = 0.5
OURS = "app.kubernetes.io/part-of=pipelinerl-e2e"
"""Label of every namespace that the tests make."""

Value = TypeVar("Value")


class CannotRun(Exception):
    """This machine cannot run a cluster; the message says why."""


@dataclass(frozen=True)
class Cluster:
    """A Kubernetes cluster, used through kubectl and Helm as its users do."""

    kubeconfig: Path
    is_local: bool
    """Whether it is the local cluster of e2e/cluster, whose parts tests may stop."""
    registry: str
    tag: str

    def kubectl(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> str:
        """Runs kubectl and returns what it printed; with check=False its errors too."""
        return self._run("kubectl", arguments, stdin, timeout_s, check)

    def helm(self, *arguments: str, timeout_s: float = 240, check: bool = True) -> str:
        return self._run("helm", arguments, None, timeout_s, check)

    def get(self, *arguments: str) -> dict[str, Any] | None:
        """Gets an object or a list; None when it does not exist."""
        text = self.kubectl("get", *arguments, "--ignore-not-found", "--output", "json")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        return list((self.get(*arguments) or {}).get("items", []))

    def apply(self, body: Mapping[str, Any]) -> str:
        return self.kubectl("apply", "--filename", "-", stdin=json.dumps(body))

    def _run(
        self,
        tool: str,
        arguments: tuple[str, ...],
        stdin: str | None,
        timeout_s: float,
        check: bool,
    ) -> str:
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        command = [found(tool), *arguments]
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environment,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{tool} {' '.join(arguments)}: status "
                f"{done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout if check else done.stdout + done.stderr


def found(tool: str) -> str:
    """Path of kubectl or helm: what e2e/cluster/tools fetched, else the machine's own. Raises
    CannotRun.
    """
    path = shutil.which(tool, path=f"{BINARIES}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        raise CannotRun(
            f"there is no {tool} in {BINARIES} or on the PATH: bash e2e/cluster/tools fetches it"
        )
    return path


def wait_for(
    what: str,
    look: Callable[[], Value | None],
    timeout_s: float,
    now: Callable[[], object] = lambda: "",
) -> Value:
    """Waits for the first true value of `look`. Raises AssertionError with the state, `now()`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            value = look()
            problem = ""
        except (
            AssertionError,
            subprocess.TimeoutExpired,
        ) as error:  # the API server may be unreachable for a while
            value, problem = None, str(error)
        if value:
            return value
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:g} s\n{problem}{now()}"
        time.sleep(POLL_S)


def existing() -> Cluster | None:
    """The cluster of KUBECONFIG, or None. Raises CannotRun when these tests must not use it."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if not kubeconfig:
        return None
    tag = os.environ.get("PIPELINERL_TEST_TAG", "e2e")
    if Path(kubeconfig) == STATE / "admin.conf":
        return Cluster(Path(kubeconfig), True, "localhost", tag)
    registry = os.environ.get("PIPELINERL_TEST_REGISTRY")
    if not registry:
        raise CannotRun(
            f"KUBECONFIG={kubeconfig} is set: PIPELINERL_TEST_REGISTRY must name the registry of "
            "its images"
        )
    return Cluster(Path(kubeconfig), False, registry, tag)


def bring_up() -> Cluster:
    """Builds the missing parts of the local cluster and starts it. Raises CannotRun."""
    _script("prepare", timeout_s=2400)
    take_down()
    kubeconfig = _script("up", timeout_s=240).splitlines()[-1]
    _script("load-images", timeout_s=600)
    return Cluster(Path(kubeconfig), True, "localhost", "e2e")


def take_down() -> None:
    _script("down", timeout_s=120)


def outage(component: str, seconds: float) -> None:
    """Stops one of the local cluster's own processes ("apiserver") and starts it again after a
    while.
    """
    _script("outage", component, str(seconds), timeout_s=seconds + 120)


def signal_container(container_id: str, signal: str) -> None:
    """Sends "KILL", "STOP" or "CONT" to a container of the local cluster; its id as in a pod's
    status, "containerd://...".
    """
    identity = container_id.removeprefix("containerd://")
    subprocess.run(
        ["ctr", "-n", "k8s.io", "task", "kill", "-s", signal, identity], check=True, timeout=30
    )


def _script(name: str, *arguments: str, timeout_s: float) -> str:
    environment = {**os.environ, "CLUSTER_PYTHON": sys.executable, "PIPELINERL_VENV": sys.prefix}
    command = [str(SCRIPTS / name), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(
            f"e2e/cluster/{name} has not ended after {timeout_s:g} "
            f"s\n{error.stdout!r}{error.stderr!r}"
        ) from None
    if done.returncode == 3:
        raise CannotRun(done.stderr.strip())
    if done.returncode != 0:
        raise AssertionError(
            f"e2e/cluster/{name}: status "
            f"{done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def diagnosis(cluster: Cluster) -> str:
    """Objects, events and logs in every namespace of the tests, as a person would look at first."""
    parts: list[str] = []
    try:
        for each in cluster.items("namespaces", "--selector", OURS):
            parts += _namespace_parts(cluster, each["metadata"]["name"])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        parts.append(f"the cluster does not answer: {error}")
    return "\n".join(parts)


def _namespace_parts(cluster: Cluster, namespace: str) -> Iterator[str]:
    for arguments in (
        ("get", "prl,pods,services", "--output", "wide"),
        ("get", "events", "--sort-by", ".lastTimestamp"),
        ("describe", "prl"),
    ):
        text = cluster.kubectl("--namespace", namespace, *arguments, check=False)
        yield f"$ kubectl -n {namespace} {' '.join(arguments)}\n{text[-6000:]}"
    for pod in cluster.items("pods", "--namespace", namespace):
        name = pod["metadata"]["name"]
        log = cluster.kubectl(
            "--namespace", namespace, "logs", name, "--all-containers", "--tail", "25", check=False
        )
        yield f"$ kubectl -n {namespace} logs {name}\n{log[-5000:]}"
