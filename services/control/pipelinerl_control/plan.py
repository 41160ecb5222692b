"""Processes of a job: pure, and the same for `pipelinerl up` and the operator.

```
preprocessor-0               ledger, batches                 one
generator-<actor>-<i>        decodes for actor-<actor>       actors.replicas x generatorsPerReplica
reference-<i>                frozen reference model          reference.replicas
actor-<i>                    rollout loop                    actors.replicas
trainer-<rank>               optimizer                       trainers.replicas x processesPerNode
evaluator-0                  measures checkpoints            one, with spec.evaluation
```
NATS and the coordinator belong to the runtime that executes the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pipelinerl_common.settings import EvaluationSettings, Job


class Role(StrEnum):
    """The kinds of processes."""

    PREPROCESSOR = "preprocessor"
    GENERATOR = "generator"
    REFERENCE = "reference"
    ACTOR = "actor"
    TRAINER = "trainer"
    EVALUATOR = "evaluator"


class RestartScope(StrEnum):
    """What restarts when a process of the role crashes."""

    ALONE = "alone"
    """Only the process itself: the others tolerate its absence."""
    ROLE = "role"
    """All processes of the role, from the last checkpoint: they share collectives."""


RESTART_SCOPES: Mapping[Role, RestartScope] = {
    role: RestartScope.ROLE if role is Role.TRAINER else RestartScope.ALONE for role in Role
}

ENDING_ROLES = frozenset({Role.TRAINER, Role.EVALUATOR})
"""Roles whose work ends."""

EVALUATION_MARGIN_S = 60.0
"""Time for an evaluator to be scheduled and to start."""

MODULES: Mapping[Role, str] = {
    Role.PREPROCESSOR: "pipelinerl_preprocessor",
    Role.GENERATOR: "pipelinerl_actor.generator",
    Role.REFERENCE: "pipelinerl_actor.generator",
    Role.ACTOR: "pipelinerl_actor.rollout",
    Role.TRAINER: "pipelinerl_trainer",
    Role.EVALUATOR: "pipelinerl_actor.evaluation",
}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses and files that the runtime decides and the plan only passes on."""

    job_file: Path
    output: Path
    nats_url: str
    coordinator: str
    """`host:port` of the weight-transfer coordinator's gRPC server."""
    addresses: Mapping[str, str]
    """`host:port` by process name, for every name of `process_names(job)`."""
    trainer_master: str
    """`host:port` of the trainer ranks' own rendezvous, on rank 0."""
    token_file: Path | None = None
    nats_credentials: Path | None = None
    """Login at the sample stream's server; None uses the job's token."""
    nats_ca_file: Path | None = None
    """CA certificates of the sample stream's server; None uses the system's."""
    log_level: str = "info"
    metrics_addresses: Mapping[str, str] = field(default_factory=dict)
    """`host:port` of `/metrics` by process name; a process that is not named serves none."""
    listen_hosts: Mapping[Role, str] = field(default_factory=dict)
    """Hosts that services of a role bind when it is not the host of their address, for example all
    interfaces of a pod.
    """


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process of a job.

    Example: PlannedProcess("actor-0", Role.ACTOR, 0, ("python", "-m",
    "pipelinerl_actor.rollout", "--job", ...), "127.0.0.1:4711").
    """

    name: str
    role: Role
    index: int
    argv: tuple[str, ...]
    """Command line; `python` stands for the interpreter that the runtime chooses."""
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def restart_scope(self) -> RestartScope:
        return RESTART_SCOPES[self.role]


def role_of(name: str) -> Role:
    return Role(name.partition("-")[0])


def process_names(job: Job) -> tuple[str, ...]:
    """Names of the job's processes in start order; they depend only on the job."""
    spec = job.spec
    actors = range(spec.actors.replicas)
    return (
        "preprocessor-0",
        *(name for actor in actors for name in generator_names(job, actor)),
        *reference_names(job),
        *(f"trainer-{rank}" for rank in range(num_trainer_ranks(job))),
        *(f"actor-{index}" for index in actors),
        *evaluator_names(job),
    )


def with_actors(job: Job, count: int) -> Job:
    """The same job with another number of actors, within the spec's bounds."""
    spec = job.spec.model_copy(
        update={"actors": job.spec.actors.model_copy(update={"replicas": count})}
    )
    return job.model_copy(update={"spec": spec})


def generator_names(job: Job, actor: int) -> tuple[str, ...]:
    """Names of the generators of one actor, the only ones that it routes to."""
    return tuple(
        f"generator-{actor}-{index}" for index in range(job.spec.actors.generators_per_replica)
    )


def reference_names(job: Job) -> tuple[str, ...]:
    return tuple(
        f"reference-{index}"
        for index in range(job.spec.reference.replicas if job.spec.reference else 0)
    )


def evaluator_names(job: Job) -> tuple[str, ...]:
    return ("evaluator-0",) if job.spec.evaluation else ()


def num_trainer_ranks(job: Job) -> int:
    return job.spec.trainers.replicas * job.spec.trainers.processes_per_node


def generator_url(address: str) -> str:
    return f"http://{address}"


def longest_evaluation_s(settings: EvaluationSettings) -> float:
    """Longest wait for the evaluation of the last step: another evaluation may run before it."""
    return 2 * settings.timeout_seconds + EVALUATION_MARGIN_S


def num_gpus(job: Job, name: str) -> int:
    """Number of GPUs of one process.

    Example: 8 GPUs and 4 generators per actor are 2 for each generator, one for each of its
    workers, and 0 for the rollout loop.
    """
    actors, reference, evaluation = job.spec.actors, job.spec.reference, job.spec.evaluation
    match role_of(name):
        case Role.GENERATOR if actors.gpus_per_replica:
            return actors.gpus_per_replica // actors.generators_per_replica
        case Role.REFERENCE if reference is not None:
            by_default = reference.generator.tensor_parallel_size if actors.gpus_per_replica else 0
            return by_default if reference.gpus_per_replica is None else reference.gpus_per_replica
        case Role.EVALUATOR if evaluation is not None:
            engine = evaluation.generator or actors.generator
            by_default = engine.tensor_parallel_size if actors.gpus_per_replica else 0
            return (
                by_default if evaluation.gpus_per_replica is None else evaluation.gpus_per_replica
            )
        case Role.TRAINER if actors.gpus_per_replica:
            return 1
        case _:
            return 0


def plan(job: Job, endpoints: Endpoints) -> tuple[PlannedProcess, ...]:
    """The job's processes in start order. Raises ValueError for an address that is missing."""
    missing = [name for name in process_names(job) if name not in endpoints.addresses]
    if missing:
        raise ValueError(f"no address for {', '.join(missing)}")
    return tuple(plan_process(job, endpoints, name) for name in process_names(job))


def plan_process(job: Job, endpoints: Endpoints, name: str) -> PlannedProcess:
    """One of the job's processes. `endpoints` needs only the addresses that this process uses."""
    role = role_of(name)
    index = int(name.rpartition("-")[2])
    argv = (
        "python",
        "-m",
        MODULES[role],
        *_common_flags(endpoints, name),
        *_role_flags(job, endpoints, role, index),
    )
    return PlannedProcess(
        name=name, role=role, index=index, argv=argv, address=endpoints.addresses[name]
    )


def _common_flags(endpoints: Endpoints, name: str) -> tuple[str, ...]:
    optional = {
        "--token-file": endpoints.token_file,
        "--nats-credentials": endpoints.nats_credentials,
        "--nats-ca-file": endpoints.nats_ca_file,
        "--metrics-listen": endpoints.metrics_addresses.get(name),
    }
    return (
        *("--job", str(endpoints.job_file)),
        *("--name", name),
        *("--output", str(endpoints.output)),
        *("--listen", _listen(endpoints, name)),
        *("--nats-url", endpoints.nats_url),
        *("--preprocessor", endpoints.addresses["preprocessor-0"]),
        *("--coordinator", endpoints.coordinator),
        *(part for flag, value in optional.items() if value for part in (flag, str(value))),
        *("--log-level", endpoints.log_level),
    )


def _listen(endpoints: Endpoints, name: str) -> str:
    address = endpoints.addresses[name]
    host = endpoints.listen_hosts.get(role_of(name))
    return address if host is None else f"{host}:{address.rpartition(':')[2]}"


def _role_flags(job: Job, endpoints: Endpoints, role: Role, index: int) -> tuple[str, ...]:
    def flags(flag: str, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            part for name in names for part in (flag, generator_url(endpoints.addresses[name]))
        )

    if role is Role.PREPROCESSOR:
        return flags("--reference", reference_names(job))
    if role is Role.REFERENCE:
        return ("--serve-initial",)
    if role is Role.ACTOR:
        return flags("--generator", generator_names(job, index))
    if role is Role.TRAINER:
        host, _, port = endpoints.trainer_master.rpartition(":")
        ranks = ("--rank", str(index), "--num-ranks", str(num_trainer_ranks(job)))
        # For the parity check. Actor 0 always exists, so that the trainers' command line does not
        # depend on the number of actors.
        generators = flags("--generator", generator_names(job, 0))
        # Every start of the trainers resumes from the newest checkpoint, if there is one.
        return (*generators, *ranks, "--master-address", host, "--master-port", port, "--resume")
    return ()


HTTP_ROLES = (Role.GENERATOR, Role.REFERENCE)
"""Roles whose HTTP port has /metrics too."""
