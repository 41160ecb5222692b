"""Jobs, and a cluster in memory with one operator in it, where time passes only when a test says
so.
"""

import copy
from collections.abc import Iterable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from operator_fake_api import Call, Crash, FakeApi

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_control.balance import Balance
from pipelinerl_operator.controller.cluster import OWNED, ClusterCache, child_resources
from pipelinerl_operator.controller.decision import Note, RuntimeReport, Wanted
from pipelinerl_operator.controller.events import EventRecorder
from pipelinerl_operator.controller.executor import Dependencies
from pipelinerl_operator.controller.job_runtime import JobRuntimes
from pipelinerl_operator.controller.reconciler import Reconciler
from pipelinerl_operator.controller.status import JobPhase, JobStatus, TrainingStatus
from pipelinerl_operator.controller.streams import JobStreams
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import Object, ObjectKey, Selection
from pipelinerl_operator.kube.resources import JOBS, PODS, key_of
from pipelinerl_operator.nats.streams import StreamAdmin
from pipelinerl_operator.objects import Capabilities, JobResource, OperatorContext
from pipelinerl_operator.objects.names import POD_ROLES

ON_CPU = {"weightTransfer": {"backend": "gloo"}}
OLD = Capabilities(20, frozenset({"policy/v1beta1"}))
"""A 1.20 server."""


def make_raw(name: str = "sums", **spec: Any) -> dict[str, Any]:
    """The resource as the API server gives it; sections in `spec` replace the small job's own."""
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": name, "namespace": "lab", "uid": "0b5b0d7c-a09c", "generation": 1},
        "spec": deepcopy(
            {
                "model": {"uri": "tiny://arithmetic"},
                "task": {"path": "tasks:Sums"},
                **ON_CPU,
                **spec,
            }
        ),
    }


def make_resource(name: str = "sums", **spec: Any) -> JobResource:
    return JobResource.parse(make_raw(name, **spec))


def make_context(**changes: Any) -> OperatorContext:
    return OperatorContext(
        **{
            "images": {role: f"registry/{role.value}:1" for role in POD_ROLES},
            "coordinator": "operator.system.svc:7100",
            "nats_url": "nats://nats.system.svc:4222",
            **changes,
        }
    )


JOB = ObjectKey("default", "sums")
CAPABILITIES = Capabilities(36, frozenset({"policy/v1", "scheduling.volcano.sh/v1beta1"}))
CONTEXT = OperatorContext(
    images={role: f"{role}:1" for role in POD_ROLES},
    coordinator="operator:50052",
    nats_url="nats://nats:4222",
    capabilities=CAPABILITIES,
)


def job(name: str = "sums", **spec: Any) -> Object:
    """Two trainers and two actors unless `spec` says otherwise; sections are given whole."""
    defaults: Object = {
        "model": {"uri": "tiny://arithmetic", "dtype": "float32", "maxModelLen": 64},
        "task": {
            "path": "pipelinerl_actor.tasks.arithmetic:Arithmetic",
            "sampling": {"maxTokens": 4},
        },
        "actors": {"replicas": 2, "minReplicas": 1},
        "trainers": {"replicas": 2, "checkpoint": {"pvc": "checkpoints"}},
        "weightTransfer": {"backend": "gloo"},
        "failurePolicy": {"backoff": {"initialSeconds": 1, "maxSeconds": 8}},
    }
    return {
        "apiVersion": JOBS.api_version,
        "kind": JOBS.kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {**copy.deepcopy(defaults), **spec},
    }


class FakeRecorder(EventRecorder):
    """Keeps events instead of writing them."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    async def record(self, job: JobView, note: Note) -> None:
        self.notes.append(note)

    def forget(self, key: ObjectKey) -> None:
        pass

    @property
    def reasons(self) -> list[str]:
        return [note.reason for note in self.notes]


class FakeRuntimes(JobRuntimes):
    """Runs nothing: keeps the token of each job, and reports the numbers that a test gave."""

    def __init__(
        self,
        trainings: Mapping[ObjectKey, TrainingStatus] = MappingProxyType({}),
        balances: Mapping[ObjectKey, Balance] = MappingProxyType({}),
    ) -> None:
        self.tokens: dict[ObjectKey, str | None] = {}
        self._trainings = trainings
        self._balances = balances

    def report(self, key: ObjectKey) -> RuntimeReport:
        return RuntimeReport(training=self._trainings.get(key), balance=self._balances.get(key))

    def follow(
        self, job: JobView, wanted: Wanted | None, status: JobStatus, token: str | None
    ) -> None:
        self.tokens[job.key] = token

    def forget(self, key: ObjectKey) -> None:
        pass


class FakeCluster:
    """`violations` are broken promises, found the moment that they are broken."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.api = FakeApi(lambda: self.now)
        self.api.before_create = self._watch_creation
        self.notes = FakeRecorder()
        self.violations: list[str] = []
        self.made: dict[str, list[int]] = {}
        """Attempts of every pod that was made, by name."""
        self.failed: set[tuple[str, int]] = set()
        self.admin: StreamAdmin | None = None
        """Administration of streams; used from the operator's next start."""
        self.trainings: dict[ObjectKey, TrainingStatus] = {}
        self.balances: dict[ObjectKey, Balance] = {}
        """Balances of generation and training that the jobs' metrics give."""
        self.restart_operator()

    # the operator

    def restart_operator(self) -> None:
        """A new leader with nothing in mind."""
        self.wanted: set[ObjectKey] = set()
        self.cluster = ClusterCache(child_resources(CAPABILITIES.api_versions), self.wanted.add)
        self.runtimes = FakeRuntimes(self.trainings, self.balances)
        deps = Dependencies(
            self.api,
            self.cluster,
            CONTEXT,
            self.runtimes,
            self.notes,
            JobStreams(self.admin),
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )
        self.reconciler = Reconciler(deps)
        self.sync()

    def sync(self, resources: Iterable[Any] | None = None) -> None:
        """The stores catch up with the API server; only those of `resources` when given."""
        stores: dict[Any, Any] = {
            JOBS: self.cluster.jobs,
            PODS: self.cluster.pods,
            **self.cluster.children,
        }
        for resource in stores if resources is None else resources:
            selection = Selection(resource, None, "" if resource == JOBS else OWNED)
            bodies = self.api.list(selection)
            for body in bodies:
                stores[resource].put(body)
            stores[resource].keep_only([key_of(body) for body in bodies], None)

    async def look(self, key: ObjectKey = JOB) -> float | None:
        """One reconcile, with errors of the API server taken as the controller takes them."""
        try:
            return await self.reconciler.reconcile(key)
        except PipelineRLError:
            return 0.0
        except Crash:
            self.api.fault = lambda call: None
            self.restart_operator()
            return 0.0

    async def settle(self, *, kubelet: bool = True, rounds: int = 60, step_s: float = 1.0) -> None:
        """Reconciles until nothing is written for several rounds in which time passes."""
        quiet = 0
        for _ in range(rounds):
            before = self.api.version
            self.sync()
            for key in self._jobs():
                await self.look(key)
            if kubelet:
                self.run_pods()
            self.now += step_s
            quiet = quiet + 1 if self.api.version == before else 0
            if quiet >= 12:
                return
        raise AssertionError(f"never quiet; newest writes: {self.api.writes[-6:]}")

    def _jobs(self) -> list[ObjectKey]:
        return [key_of(body) for body in self.api.list(Selection(JOBS))] or [JOB]

    # the cluster around it

    async def submit(self, body: Object | None = None) -> None:
        await self.api.create(JOBS, "default", body or job())

    def run_pods(self) -> None:
        """The kubelet: starts what is pending, ends what is terminating."""
        for body in self.api.list(Selection(PODS)):
            key = key_of(body)
            if "deletionTimestamp" in body["metadata"]:
                self.api.remove(PODS, key, 0)
            elif body["status"]["phase"] == "Pending":
                self.start(key.name)

    def start(self, name: str) -> None:
        conditions = [
            {"type": "Ready", "status": "True"},
            {"type": "PodScheduled", "status": "True"},
        ]
        self.say(name, {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions})
        self.api.edit(
            PODS,
            ObjectKey("default", name),
            lambda body: body["spec"].update(nodeName=f"node-of-{name}"),
        )

    def end(
        self,
        name: str,
        container: str,
        exit_code: int,
        *,
        reason: str = "",
        pod_reason: str = "",
        phase: str = "",
        message: str = "",
    ) -> None:
        """One container ends; the pod with it, unless `phase` says that it runs on."""
        terminated = {
            "exitCode": exit_code,
            "reason": reason or ("Error" if exit_code else "Completed"),
            "message": message,
        }
        status = {
            "phase": phase or ("Failed" if exit_code or pod_reason else "Succeeded"),
            "reason": pod_reason,
            "containerStatuses": [{"name": container, "state": {"terminated": terminated}}],
            "conditions": [{"type": "Ready", "status": "False"}],
        }
        self.say(name, status)

    def say(self, name: str, status: Object) -> None:
        key = ObjectKey("default", name)
        if (PODS, key) in self.api.objects:
            self.api.edit(PODS, key, lambda body: body.update(status=status))
            if status["phase"] == "Failed":
                labels = self.api.objects[PODS, key]["metadata"]["labels"]
                self.failed.add((name, int(labels["pipelinerl.dev/attempt"])))

    def change(self, key: ObjectKey = JOB, **spec: Any) -> None:
        """A user edits the spec."""
        if (JOBS, key) in self.api.objects:
            self.api.edit(JOBS, key, lambda body: body["spec"].update(spec), spec=True)

    # looking

    @property
    def status(self) -> JobStatus:
        return JobStatus.read(self.api.objects[JOBS, JOB].get("status"))

    def is_in(self, phase: JobPhase) -> bool:
        return self.status.phase is phase

    def pods(self) -> dict[str, Object]:
        return {body["metadata"]["name"]: body for body in self.api.list(Selection(PODS))}

    def attempts(self) -> dict[str, int]:
        return {
            name: int(body["metadata"]["labels"]["pipelinerl.dev/attempt"])
            for name, body in self.pods().items()
        }

    def num_writes(self) -> int:
        return len(self.api.writes)

    def _watch_creation(self, call: Call) -> None:
        if call.resource != PODS or call.verb != "create":
            return
        owner = call.body["metadata"]["ownerReferences"][0]
        found = self.api.of(JOBS, owner["name"])
        attempt = int(call.body["metadata"]["labels"]["pipelinerl.dev/attempt"])
        if found is None or found["metadata"]["uid"] != owner["uid"]:
            return
        status = JobStatus.read(found.get("status"))
        if status.is_finished:
            self.violations.append(f"{call.name} made after the job had {status.phase}")
        if self.api.of(PODS, call.name) is None:
            if (call.name, attempt) in self.failed:
                self.violations.append(
                    f"{call.name} made again as attempt {attempt}, which had failed"
                )
            if "-trainer-" in call.name:
                old = [
                    name
                    for name, other in self.attempts().items()
                    if "-trainer-" in name and other < attempt
                ]
                if old:
                    self.violations.append(
                        f"{call.name} of attempt {attempt} made beside {old} of an older one"
                    )
            self.made.setdefault(call.name, []).append(attempt)


def balance(
    num_actors: int, per_actor: float, r_train: float, begin: int = 0, steps: int = 10
) -> Balance:
    """Ten steps of a job whose actors make `per_actor` groups/s each and whose trainers take up to
    `r_train`.
    """
    r_gen = num_actors * per_actor
    return Balance(begin, begin + steps, num_actors, min(r_gen, r_train), r_gen, r_train)
