"""The containers of each role, made from the processes of the plan: commands, environment, probes
and security contexts.

Liveness concerns only the process: a weight transfer or a long step never fails it. Security
contexts satisfy the pod security level `restricted`, except for one opt-in (IPC_LOCK) that it
refuses.
"""

import math
from dataclasses import dataclass
from typing import Any

from pipelinerl_common.settings import JobSpec, NetworkSettings
from pipelinerl_control.plan import PlannedProcess, Role, generator_names, num_gpus, plan_process
from pipelinerl_operator.objects.context import Capabilities, OperatorContext
from pipelinerl_operator.objects.job_resource import JobResource, own_image
from pipelinerl_operator.objects.names import (
    ATTEMPT,
    GENERATOR_PORT,
    GRPC_PORT,
    JOB_FILE,
    METRICS_PORT,
    endpoints,
    generator_port,
)
from pipelinerl_operator.objects.volumes import CACHE, mounts, output_folder

GROUP = 1000
"""Group of the images' user, for which volumes of claims are made writable."""


def pod_security(*, owns_claims: bool) -> dict[str, Any]:
    """Without a user id: images have one that is not root, and some clusters assign their own."""
    group = {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"} if owns_claims else {}
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **group}


def container_security(network: NetworkSettings | None = None) -> dict[str, Any]:
    """Security context of a container; `network` is given for one with RDMA devices."""
    lock = network is not None and network.rdma is not None and network.rdma.ipc_lock
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if lock else {})},
    }


PERIOD_S = 10
_STARTUP_FAILURES = 60
"""Ten minutes, for imports from a slow disk and a long journal."""
_LIVENESS_FAILURES = 18
"""Three minutes without a response, as in `pipelinerl up`."""


def generator_probes(port: int, startup_s: float) -> dict[str, Any]:
    """Probes: /health succeeds once the engine runs, /ready once it has the group's weights."""

    def get(path: str, **numbers: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": PERIOD_S,
            "timeoutSeconds": 5,
            **numbers,
        }

    return {
        "startupProbe": get("/health", failureThreshold=max(1, math.ceil(startup_s / PERIOD_S))),
        "livenessProbe": get("/health", failureThreshold=_LIVENESS_FAILURES),
        "readinessProbe": get("/ready", failureThreshold=2),
    }


def grpc_readiness(capabilities: Capabilities) -> dict[str, Any]:
    """Readiness probe of a gRPC service."""
    return {"readinessProbe": _grpc(capabilities, 3)}


def grpc_probes(capabilities: Capabilities) -> dict[str, Any]:
    """Probes of a process that only serves: one that does not respond must be restarted."""
    return {
        "startupProbe": _grpc(capabilities, _STARTUP_FAILURES),
        "livenessProbe": _grpc(capabilities, _LIVENESS_FAILURES),
        **grpc_readiness(capabilities),
    }


def _grpc(capabilities: Capabilities, failures: int) -> dict[str, Any]:
    ask = (
        {"grpc": {"port": GRPC_PORT}}
        if capabilities.grpc_probes
        else {"tcpSocket": {"port": GRPC_PORT}}
    )
    return {**ask, "periodSeconds": PERIOD_S, "timeoutSeconds": 5, "failureThreshold": failures}


RESERVED_PREFIX = "PRL_"

_FOLDERS = {
    "HOME": CACHE,
    "XDG_CACHE_HOME": CACHE / "xdg",
    "HF_HOME": CACHE / "huggingface",
    "TRITON_CACHE_DIR": CACHE / "triton",
    "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor",
    "VLLM_CACHE_ROOT": CACHE / "vllm",
}


def environment(
    job: JobResource, role: Role, index: int, *, has_gpus: bool
) -> list[dict[str, Any]]:
    """Environment of a container. The user's variables come last and may refer to the others."""
    contract = {
        "PRL_JOB": job.name,
        "PRL_NAMESPACE": job.namespace,
        "PRL_ROLE": role.value,
        "PRL_INDEX": str(index),
    }
    fields = {
        "PRL_ATTEMPT": f"metadata.labels['{ATTEMPT}']",
        "PRL_POD_IP": "status.podIP",
        "PRL_POD_UID": "metadata.uid",
    }
    folders = {name: str(path) for name, path in _FOLDERS.items()}
    # Libraries ask for a user name, which the user id that a cluster assigns may not have.
    fixed = {"USER": "pipelinerl", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [
        *({"name": name, "value": value} for name, value in contract.items()),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ),
        *(
            {"name": name, "value": value}
            for name, value in (folders | fixed | _collectives(job.spec, has_gpus)).items()
        ),
        *(each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in job.spec.env),
    ]


def _collectives(spec: JobSpec, has_gpus: bool) -> dict[str, str]:
    network = spec.network
    variables = {
        # Says why a connection fails, and nothing while all is well.
        "NCCL_DEBUG": "WARN" if has_gpus else None,
        "NCCL_SOCKET_IFNAME": network.nccl_interface or network.interface,
        "GLOO_SOCKET_IFNAME": network.interface,
    }
    return {name: value for name, value in variables.items() if value}


THREADS = "OMP_NUM_THREADS"
_THREADS_OF_UNKNOWN_SHARE = 4


def limit_threads(container: dict[str, Any], num_processes: int) -> None:
    """Gives each of the container's processes its share of the CPUs as OMP_NUM_THREADS, unless the
    user has set it: by default every process starts a thread for each core of the node.

    The share is the CPU limit, or else the request. With GPUs and neither it is four, as others
    compute on the node too.
    """
    resources = container.get("resources") or {}
    shares = ((resources.get(kind) or {}).get("cpu") for kind in ("limits", "requests"))
    share = _cores(next((each for each in shares if each is not None), None))
    has_gpus = GPU in (resources.get("limits") or {})
    if any(each["name"] == THREADS for each in container["env"]) or not (share or has_gpus):
        return
    threads = max(1, int(share / num_processes)) if share else _THREADS_OF_UNKNOWN_SHARE
    container["env"].insert(0, {"name": THREADS, "value": str(threads)})


def _cores(quantity: str | float | None) -> float | None:
    """Cores of a quantity of Kubernetes, for example 2, "1.5" or "500m"; None for what is none,
    which the API server refuses with its own message.
    """
    text = str(quantity)
    try:
        return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    except ValueError:
        return None


GPU = "nvidia.com/gpu"
LAUNCH_MODULE = "pipelinerl_trainer.launch"
PREPARE_MODULE = "pipelinerl_actor.prepare"
TERMINATION_LOG = "/dev/termination-log"
"""File whose content becomes the container's message in the pod's status when it ends."""


@dataclass(frozen=True, slots=True)
class Containers:
    """Containers of a pod. `num_gpus` is the sum over all of them."""

    init: tuple[dict[str, Any], ...]
    main: tuple[dict[str, Any], ...]
    num_gpus: int


def workloads_of_pod(
    spec: JobSpec, role: Role, index: int, generators: tuple[str, ...]
) -> tuple[str, ...]:
    """Names of the processes that run in a pod. `generators` are those of actor `index`."""
    if role is Role.ACTOR:
        return (f"actor-{index}", *generators)
    if role is Role.TRAINER:
        num_ranks = spec.trainers.processes_per_node
        return tuple(f"trainer-{index * num_ranks + local}" for local in range(num_ranks))
    return (f"{role.value}-{index}",)


class ContainerMaker:
    """Builds the containers of one pod."""

    def __init__(self, job: JobResource, context: OperatorContext, role: Role, index: int) -> None:
        self._job, self._context, self._role, self._index = job, context, role, index
        self._output = output_folder(job, role)
        self.names = workloads_of_pod(job.spec, role, index, generator_names(job.job, index))
        wiring = endpoints(job, context, self.names, self._output)
        self._workloads = tuple(plan_process(job.job, wiring, name) for name in self.names)

    def make(self) -> Containers:
        main = {
            Role.ACTOR: self._actor,
            Role.TRAINER: self._trainer,
            Role.PREPROCESSOR: self._preprocessor,
            Role.REFERENCE: self._reference,
            Role.EVALUATOR: self._evaluator,
        }[self._role]()
        init = () if self._role is Role.PREPROCESSOR else (self._prepare(),)
        return Containers(init, main, sum(num_gpus(self._job.job, name) for name in self.names))

    def _actor(self) -> tuple[dict[str, Any], ...]:
        rollout, *generators = self._workloads
        startup_s = self._job.spec.actors.startup_timeout_seconds
        return (
            self._container("rollout", rollout.argv, {"metrics": METRICS_PORT}),
            *(
                self._generator(f"generator-{index}", workload, generator_port(index), startup_s)
                for index, workload in enumerate(generators)
            ),
        )

    def _reference(self) -> tuple[dict[str, Any], ...]:
        settings = self._job.spec.reference
        startup_s = settings.startup_timeout_seconds if settings else 0.0
        return (self._generator("generator", self._workloads[0], GENERATOR_PORT, startup_s),)

    def _generator(
        self, name: str, workload: PlannedProcess, port: int, startup_s: float
    ) -> dict[str, Any]:
        gpus = num_gpus(self._job.job, workload.name)
        container = self._container(name, workload.argv, {"metrics": port}, num_gpus=gpus)
        return container | generator_probes(port, startup_s)

    def _preprocessor(self) -> tuple[dict[str, Any], ...]:
        container = self._container(
            "preprocessor", self._workloads[0].argv, {"grpc": GRPC_PORT, "metrics": METRICS_PORT}
        )
        return (container | grpc_probes(self._context.capabilities),)

    def _trainer(self) -> tuple[dict[str, Any], ...]:
        """One container with all ranks of the node; only that of rank 0 serves."""
        gpus = sum(num_gpus(self._job.job, name) for name in self.names)
        last = ("--last-metrics", TERMINATION_LOG) if self._index == 0 else ()
        container = self._container(
            "trainer",
            (*launch_argv(self._workloads), *last),
            {"grpc": GRPC_PORT, "metrics": METRICS_PORT},
            num_gpus=gpus,
        )
        return (
            container | (grpc_readiness(self._context.capabilities) if self._index == 0 else {}),
        )

    def _evaluator(self) -> tuple[dict[str, Any], ...]:
        """The container of the evaluator, which starts a generator as its child."""
        workload = self._workloads[0]
        argv = (*workload.argv, "--last-result", TERMINATION_LOG)
        gpus = num_gpus(self._job.job, workload.name)
        return (self._container("evaluator", argv, {"metrics": METRICS_PORT}, num_gpus=gpus),)

    def _prepare(self) -> dict[str, Any]:
        flags = (
            "--job",
            str(JOB_FILE),
            "--output",
            str(self._output),
            "--cache",
            str(CACHE / "pipelinerl"),
        )
        check = {Role.ACTOR: ("--check-task",), Role.EVALUATOR: ("--check-sets",)}.get(
            self._role, ()
        )
        return self._container("prepare", ("python", "-m", PREPARE_MODULE, *flags, *check), {})

    def _container(
        self, name: str, argv: tuple[str, ...], ports: dict[str, int], *, num_gpus: int = 0
    ) -> dict[str, Any]:
        job, context = self._job, self._context
        pull = {"imagePullPolicy": context.image_pull_policy} if context.image_pull_policy else {}
        resources = self._resources(num_gpus)
        return {
            "name": name,
            "image": image(job.spec, context, self._role),
            **pull,
            "command": list(argv[:3]),
            "args": list(argv[3:]),
            "env": environment(job, self._role, self._index, has_gpus=num_gpus > 0),
            **(
                {"ports": [{"name": key, "containerPort": port} for key, port in ports.items()]}
                if ports
                else {}
            ),
            **({"resources": {"requests": resources, "limits": resources}} if resources else {}),
            "securityContext": container_security(job.spec.network if num_gpus else None),
            "volumeMounts": [each.mount() for each in mounts(job, self._role)],
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }

    def _resources(self, num_gpus: int) -> dict[str, str]:
        rdma = self._job.spec.network.rdma
        if not num_gpus:
            return {}
        devices = {} if rdma is None else {rdma.resource_name: str(rdma.count * num_gpus)}
        return {GPU: str(num_gpus), **devices}


def launch_argv(ranks: tuple[PlannedProcess, ...]) -> tuple[str, ...]:
    """Command of a trainer pod: the rank itself, or a launcher that starts the node's ranks with
    the flags of the first.
    """
    first = ranks[0].argv
    if len(ranks) == 1:
        return first
    return ("python", "-m", LAUNCH_MODULE, *first[3:], "--processes", str(len(ranks)))


def image(spec: JobSpec, context: OperatorContext, role: Role) -> str:
    """Image of a role: that of the role, of the job, or of the operator."""
    return own_image(spec, role) or context.images[role]
