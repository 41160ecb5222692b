"""Where Prometheus finds the metrics of a local run: the addresses of its processes, the metrics of
this process, and a list of all targets in the run's folder.

scrape_configs:
  - job_name: pipelinerl
    honor_labels: true
    file_sd_configs: [{files: [runs/*/metrics-targets.json]}]
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from pipelinerl_cli.run_folder import RunFolder
from pipelinerl_cli.up.placement import Ports
from pipelinerl_common.files import write_whole
from pipelinerl_common.metrics import COORDINATOR, Metrics
from pipelinerl_common.settings import Job
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_control.metrics import ActorScale, export_scale
from pipelinerl_control.plan import HTTP_ROLES, Endpoints, Role, process_names, role_of

log = logging.getLogger(__name__)

OWN = "up"
"""Name of this process among the targets."""


def needs_port(name: str) -> bool:
    """Whether a process gets a port for metrics: generators have an HTTP port anyway, and only the
    first of the trainer's ranks serves metrics.
    """
    role = role_of(name)
    return role not in HTTP_ROLES and (role is not Role.TRAINER or name == "trainer-0")


def make_endpoints(job: Job, folder: RunFolder, ports: Ports, nats_url: str) -> Endpoints:
    """An address for everything that `job` may ever run."""
    names = process_names(job)
    return Endpoints(
        job_file=folder.job_file,
        output=folder.root,
        nats_url=nats_url,
        coordinator=ports.address(),
        addresses={name: ports.address() for name in names},
        trainer_master=ports.address(),
        token_file=folder.token_file,
        metrics_addresses={name: ports.address() for name in (OWN, *filter(needs_port, names))},
    )


def write_targets(folder: RunFolder, endpoints: Endpoints, job: Job) -> None:
    """Lists the targets of `job`, which has the actors that there are."""
    try:
        text = targets_file(job, endpoints.addresses, endpoints.metrics_addresses)
        write_whole(folder.root / "metrics-targets.json", text)
    except OSError as error:  # a full disk must not end the run
        log.warning("Prometheus' list of targets is not up to date: %s", error)


def targets_file(
    job: Job, addresses: Mapping[str, str], metrics_addresses: Mapping[str, str]
) -> str:
    """Prometheus' file-based service discovery: one target for each process that has metrics.

    `addresses` are the processes' own, `metrics_addresses` their ports for metrics and that of this
    process.
    """
    found = {OWN: metrics_addresses[OWN]}
    for name in process_names(job):
        if name in metrics_addresses:
            found[name] = metrics_addresses[name]
        elif role_of(name) in HTTP_ROLES:
            found[name] = addresses[name]
    targets = []
    for name, address in found.items():
        role = COORDINATOR if name == OWN else role_of(name).value
        labels = {"job": job.name, "role": role, "instance": name}
        targets.append({"targets": [address], "labels": labels})
    return json.dumps(targets, indent=1) + "\n"


def own_metrics(job: Job, restarts: Counter[str], scale: Callable[[], ActorScale]) -> Metrics:
    """This process's. `restarts` counts by the name of the restarted process."""
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
