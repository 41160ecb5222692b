"""The share of this machine that each process of a run gets: compute threads, GPUs, ports."""

import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job
from pipelinerl_common.text import counted
from pipelinerl_control.plan import num_gpus, process_names, role_of

LOOPBACK = "127.0.0.1"
_COMPUTING = ("generator-", "reference-", "trainer-", "evaluator-")


def threads_per_process(job: Job, cores: int) -> int:
    """Compute threads of each generator, reference, trainer rank and evaluator, so that together
    they have about the cores.
    """
    computing = [name for name in process_names(job) if name.startswith(_COMPUTING)]
    return max(1, cores // len(computing))


def assign_gpus(job: Job, visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by process: generators, references, trainer ranks, the evaluator, each
    with GPUs of its own.

    `visible` is the variable's value for this process, None when unset. A job without GPUs sees
    none. Example: actors with 2 GPUs and 2 generators each, one actor, one rank:
    {"generator-0-0": "0", "generator-0-1": "1", "trainer-0": "2"}.
    """
    ids = visible.split(",") if visible else []
    assigned: dict[str, str] = {}
    taken = 0
    for name in process_names(job):
        own = range(taken, taken + num_gpus(job, name))
        assigned[name] = ",".join(ids[k] if k < len(ids) else str(k) for k in own)
        taken = own.stop
    return assigned


def gpus_by_role(job: Job) -> dict[str, int]:
    """GPUs of all processes of a role, for the roles that have any. Example: {"generator": 2,
    "trainer": 1}.
    """
    counts: Counter[str] = Counter()
    for name in process_names(job):
        counts[role_of(name).value] += num_gpus(job, name)
    return {role: count for role, count in counts.items() if count}


def missing_gpus(job: Job, available: int) -> list[str]:
    """One problem when the job needs more GPUs than the machine has, else none."""
    needed = gpus_by_role(job)
    total = sum(needed.values())
    if total <= available:
        return []
    spec = job.spec
    sections = {"actors": spec.actors, "reference": spec.reference, "evaluation": spec.evaluation}
    fields = " and ".join(
        f"{name}.gpusPerReplica={section.gpus_per_replica}"
        for name, section in sections.items()
        if section is not None and section.gpus_per_replica
    )
    shares = ", ".join(f"{role} {count}" for role, count in needed.items())
    fewer = "lower it, or the numbers of replicas; " if available else ""
    return [
        f"{fields}: the job needs {counted(total, 'GPU')} ({shares}), this machine has {available} "
        f"(as PyTorch counts them); {fewer}gpusPerReplica=0 with weightTransfer.backend=gloo runs "
        "on the CPU"
    ]


def environment(job: Job, name: str, inherited: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of the process `name`. The user's own number of threads is kept."""
    gpus = assign_gpus(job, inherited.get("CUDA_VISIBLE_DEVICES"))
    return {
        "OMP_NUM_THREADS": str(threads_per_process(job, cores)),
        "TOKENIZERS_PARALLELISM": "false",
        **inherited,
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": gpus.get(name, ""),
    }


class Ports(ExitStack):
    """Reserves free loopback ports for the run's processes; leaving the context releases them.

    A port that was found free and released again may be gone before its process binds it, above all
    to an outgoing connection. So each port stays bound here, by a socket that never listens: with
    SO_REUSEADDR on both sides Linux lets the process listen on the port too, and assigns it to no
    process that asks for any free one.
    """

    def reserve(self) -> int:
        """A port that no other process on this machine has or gets."""
        held = self.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        return int(held.getsockname()[1])

    def address(self) -> str:
        """A reserved "host:port"."""
        return f"{LOOPBACK}:{self.reserve()}"


def check_port_is_free(field: str, port: int) -> None:
    """Raises SettingsError when another process listens on the port that the job file asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError as error:
            raise SettingsError(
                f"{field}={port}: the port is occupied ({error.strerror}); end the process that "
                "has it, choose another port, or 0 for any free one"
            ) from error
