"""How the run's processes share this machine: threads and GPUs. Pure."""

from collections.abc import Mapping

from pipelinerl_common.settings import Job
from pipelinerl_operator.plan import num_gpus, workload_names

_COMPUTING = ("generator-", "reference-", "trainer-", "evaluator-")


def threads_per_process(job: Job, cores: int) -> int:
    """Compute threads of each generator, reference, trainer rank and evaluator, so that together they have about the cores."""
    computing = [name for name in workload_names(job) if name.startswith(_COMPUTING)]
    return max(1, cores // len(computing))


def assign_gpus(job: Job, visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by process: generators, references, trainer ranks, the evaluator, each with GPUs of its own.

    `visible` is the variable's value for this process, None when unset. A job without GPUs sees none. Example: actors with 2
    GPUs and 2 generators each, one actor, one rank: {"generator-0-0": "0", "generator-0-1": "1", "trainer-0": "2"}.
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


def environment(job: Job, name: str, inherited: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of the process `name`. What the user has set for the threads is kept."""
    own = dict(inherited)
    own.setdefault("OMP_NUM_THREADS", str(threads_per_process(job, cores)))
    own.setdefault("TOKENIZERS_PARALLELISM", "false")
    own["PYTHONUNBUFFERED"] = "1"
    own["CUDA_VISIBLE_DEVICES"] = assign_gpus(job, inherited.get("CUDA_VISIBLE_DEVICES")).get(name, "")
    return own
