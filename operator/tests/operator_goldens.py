"""Jobs whose objects are kept as files in golden/: `python operator/tests/operator_goldens.py`
writes the files again.

A difference there is a difference in users' clusters: read it before it is committed.
"""

from pathlib import Path
from typing import Any

import yaml
from operator_fakes import OLD, make_context, make_resource

from pipelinerl_operator.objects import JobResource, OperatorContext, desired_objects, job_secret

FOLDER = Path(__file__).parent / "golden"

KL = {"reference": {}, "algorithm": {"kl": {"coefficient": 0.1}}}
ON_GPUS: dict[str, Any] = {
    "model": {"uri": "hf://org/model", "cache": {"pvc": "models"}},
    "image": "registry.example/pipelinerl:2",
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "actors": {
        "replicas": 2,
        "gpusPerReplica": 4,
        "generatorsPerReplica": 2,
        "generator": {"tensorParallelSize": 2},
    },
    "trainers": {
        "replicas": 2,
        "processesPerNode": 8,
        "zeroStage": 3,
        "checkpoint": {"pvc": "checkpoints"},
    },
    "weightTransfer": {"backend": "nccl"},
    "network": {"rdma": {"resourceName": "rdma/hca", "ipcLock": True}, "interface": "eth0"},
    "scheduling": {
        "gang": {"backend": "volcano", "queue": "research"},
        "topologyKey": "topology.example/rack",
    },
    **KL,
}

GOLDENS: dict[str, tuple[JobResource, OperatorContext]] = {
    "on_cpu_old_server": (make_resource(), make_context(capabilities=OLD)),
    "on_gpus": (make_resource(**ON_GPUS), make_context(has_nats_credentials=True)),
}


def manifests(name: str) -> list[dict[str, Any]]:
    """Everything of a golden job, its second attempt on any node but one."""
    job, context = GOLDENS[name]
    wanted = desired_objects(job, context)
    pods = (pod.manifest(attempt=1, excluded_nodes=["broken"]) for pod in wanted.pods)
    return [job_secret(job, "token"), *wanted.config, *pods]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def text(name: str) -> str:
    return yaml.dump_all(manifests(name), Dumper=_Dumper, sort_keys=False, width=128)


if __name__ == "__main__":
    for each in GOLDENS:
        (FOLDER / f"{each}.yaml").write_text(text(each))
