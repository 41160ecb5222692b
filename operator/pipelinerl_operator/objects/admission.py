"""What a job must fulfil in a cluster beside what its settings check themselves. The CRD's rules
say the same.
"""

import re

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job
from pipelinerl_common.text import counted

_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def admit(job: Job) -> None:
    """Raises SettingsError that lists every fault."""
    if faults := cluster_faults(job):
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise SettingsError(
            f"PipelineRLJob {job.name}: {counted(len(faults), 'fault')} for a cluster\n{lines}"
        )


def cluster_faults(job: Job) -> list[str]:
    """Each names the field, its value and the remedy."""
    spec, faults = job.spec, []
    if not _SERVICE_NAME.fullmatch(job.name):
        faults.append(
            f"metadata.name={job.name}: must begin with a letter, as names of Services do; choose "
            "another name"
        )
    if spec.weight_transfer.backend == "nccl" and spec.actors.gpus_per_replica == 0:
        faults.append(
            "spec.weightTransfer.backend=nccl needs GPUs, but spec.actors.gpusPerReplica=0: set "
            "the backend to gloo, "
            "or gpusPerReplica to the GPUs of one actor"
        )
    checkpoint = spec.trainers.checkpoint
    if spec.trainers.replicas > 1 and checkpoint.pvc is None and checkpoint.uri is None:
        faults.append(
            f"spec.trainers.replicas={spec.trainers.replicas} nodes write one checkpoint together: "
            "set "
            "spec.trainers.checkpoint.pvc to a claim that all can mount, or checkpoint.uri to a "
            "folder that all share"
        )
    if spec.evaluation is not None and checkpoint.pvc is None and checkpoint.uri is None:
        faults.append(
            "spec.evaluation reads checkpoints from another pod: set spec.trainers.checkpoint.pvc "
            "to a claim that both can "
            "mount, or checkpoint.uri to a folder that they share"
        )
    return faults
