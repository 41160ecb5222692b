"""How the run's processes share this machine: threads and GPUs. Pure."""

from collections import Counter
from collections.abc import Mapping

from pipelinerl_common.settings import Job
from pipelinerl_common.words import counted
from pipelinerl_operator.plan import num_gpus, role_of, workload_names

_COMPUTING = ("generator-", "reference-", "trainer-", "evaluator-")


def threads_per_process(job: Job, cores: int) -> int:
    """Compute threads of each generator, reference, trainer rank and evaluator, so that together
    they have about the cores.
    """
    computing = [name for name in workload_names(job) if name.startswith(_COMPUTING)]
    return max(1, cores // len(computing))


def assign_gpus(job: Job, visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by process: generators, references, trainer ranks, the evaluator, each
    with GPUs of its own.

    `visible` is the variable's value for this process, None when unset. A job without GPUs sees none. Example: actors with 2
    GPUs and 2 generators each, one actor, one rank: {"generator-0-0": "0", "generator-0-1": "1",
    "trainer-0": "2"}.
    """
    ids = visible.split(",") if visible else None
    assigned: dict[str, str] = {}
    taken = 0
    for name in workload_names(job):
        count = num_gpus(job, name)
        own = range(taken, taken + count)
        assigned[name] = ",".join(ids[k] if ids and k < len(ids) else str(k) for k in own)
        taken += count
    return assigned


def gpus_by_role(job: Job) -> dict[str, int]:
    """GPUs of all processes of a role, of the roles that have any. Example: {"generator": 2,
    "trainer": 1}.
    """
    counts: Counter[str] = Counter()
    for name in workload_names(job):
        counts[role_of(name).value] += num_gpus(job, name)
    return {role: count for role, count in counts.items() if count}


def missing_gpus(job: Job, available: int) -> list[str]:
    """The fault of a job that needs more GPUs than the machine has; empty where there are enough."""
    needed = gpus_by_role(job)
    total = sum(needed.values())
    if total <= available:
        return []
    sections = {
        "actors": job.spec.actors,
        "reference": job.spec.reference,
        "evaluation": job.spec.evaluation,
    }
    asked = [
        (name, section.gpus_per_replica)
        for name, section in sections.items()
        if section is not None
    ]
    fields = " and ".join(f"{name}.gpusPerReplica={count}" for name, count in asked if count)
    shares = ", ".join(f"{role} {count}" for role, count in needed.items())
    fewer = "lower it, or the numbers of replicas; " if available else ""
    return [
        f"{fields}: the job needs {counted(total, 'GPU')} ({shares}), this machine has {available} "
        "(as PyTorch counts them); "
        f"{fewer}gpusPerReplica=0 with weightTransfer.backend=gloo runs on the CPU"
    ]


def environment(job: Job, name: str, inherited: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of the process `name`. What the user has set for the threads is kept."""
    own = dict(inherited)
    own.setdefault("OMP_NUM_THREADS", str(threads_per_process(job, cores)))
    own.setdefault("TOKENIZERS_PARALLELISM", "false")
    own["PYTHONUNBUFFERED"] = "1"
    own["CUDA_VISIBLE_DEVICES"] = assign_gpus(job, inherited.get("CUDA_VISIBLE_DEVICES")).get(
        name, ""
    )
    return own
