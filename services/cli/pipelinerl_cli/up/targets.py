"""Where Prometheus finds the metrics of a local run: the run's own, and a list of all targets in
the run's folder.

scrape_configs:
  - job_name: pipelinerl
    honor_labels: true
    file_sd_configs: [{files: [runs/*/metrics-targets.json]}]
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from pipelinerl_common.metrics import COORDINATOR, Metrics
from pipelinerl_common.settings import Job
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_control.metrics import ActorScale, export_scale
from pipelinerl_control.plan import HTTP_ROLES, Role, process_names, role_of

OWN = "up"
"""Name of this process among the targets."""


def needs_port(name: str) -> bool:
    """Whether a process gets a port for metrics: generators have an HTTP port anyway, and of the
    trainer's ranks one speaks.
    """
    role = role_of(name)
    return role not in HTTP_ROLES and (role is not Role.TRAINER or name == "trainer-0")


def targets_file(
    job: Job, addresses: Mapping[str, str], metrics_addresses: Mapping[str, str]
) -> str:
    """Prometheus' file-based service discovery: one target for each process that has metrics.

    `addresses` are the processes' own, `metrics_addresses` the ports for metrics, that of this process included.
    """
    where = {OWN: metrics_addresses[OWN]}
    for name in process_names(job):
        if name in metrics_addresses:
            where[name] = metrics_addresses[name]
        elif role_of(name) in HTTP_ROLES:
            where[name] = addresses[name]
    targets = [
        {
            "targets": [address],
            "labels": {
                "job": job.name,
                "role": COORDINATOR if name == OWN else role_of(name).value,
                "instance": name,
            },
        }
        for name, address in where.items()
    ]
    return json.dumps(targets, indent=1) + "\n"


def own_metrics(job: Job, restarts: Counter[str], scale: Callable[[], ActorScale]) -> Metrics:
    """This process's. `restarts` counts by the name of what was started again."""
    metrics = Metrics(COORDINATOR, job.name)
    metrics.gauge("memory_bytes").read(memory_bytes)
    export_scale(metrics, scale)
    counter = metrics.counter("restarts_total")
    for restarted in counter.metric.labels["restarted"]:
        counter.read(partial(_num_restarts, restarts, restarted), restarted=restarted)
    return metrics


def _num_restarts(restarts: Counter[str], kind: str) -> float:
    return float(sum(count for name, count in restarts.items() if _kind(name) == kind))


def _kind(name: str) -> str:
    """Example: "generator-0-1" is a generator, "trainers" are trainer, "nats-server" is itself."""
    return name if name.startswith("nats") else name.partition("-")[0].removesuffix("s")
