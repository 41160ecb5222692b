"""Jobs with `autoscale`, and systems whose rates are known."""

from typing import Any

from pipelinerl_common.settings import JobSpec, parse_job
from pipelinerl_control.balance import Balance


def spec_of(least: int, most: int, start: int, gpus: int = 0, **settings: Any) -> JobSpec:
    actors = {
        "minReplicas": least,
        "maxReplicas": most,
        "replicas": start,
        "gpusPerReplica": gpus,
        "generatorsPerReplica": max(1, gpus),
    }
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {
            "model": {"uri": "tiny://arithmetic"},
            "task": {"path": "tasks:Sums"},
            "actors": actors,
            "autoscale": {"enabled": True, **settings},
        },
    }
    return parse_job(document, source="test").spec


def system(
    num_actors: int, per_actor: float, r_train: float, begin: int = 0, steps: int = 10
) -> Balance:
    """The balance of actors that make `per_actor` groups/s and trainers that take `r_train`."""
    r_gen = num_actors * per_actor
    return Balance(begin, begin + steps, num_actors, min(r_gen, r_train), r_gen, r_train)
