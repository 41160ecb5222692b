"""`pipelinerl doctor gpu --local|JOB`: what every machine or pod has for GPU collectives, and an
all-reduce and a broadcast between one process per GPU, over the communicator of weight transfers.

The processes run where the job's would: on this machine, or in the job's own containers through
kubectl, with their images, environment and devices.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_cli.doctor.finding import Finding, Named
from pipelinerl_cli.terminal import print_table
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.judgements import Severity
from pipelinerl_common.text import counted
from pipelinerl_weights.gpu_seats import Seat, ask_facts, run_group

JOB_LABEL, ROLE_LABEL = "pipelinerl.dev/job", "pipelinerl.dev/role"
ROLES = ("trainer", "actor", "reference", "evaluator")
"""In the order of ranks: rank 0 is a trainer, as in the group that transfers weights."""
LEAST_DRIVER: Mapping[str, int] = {"12": 525, "13": 580}
"""Oldest driver for each CUDA release that torch is built for."""
KUBECTL_S = 20.0
LOCAL_GLOO_MEMBERS = 2


@dataclass(slots=True)
class GpuReport:
    """What was found."""

    backend: str
    seats: list[Seat]
    members: list[dict[str, Any]] = field(default_factory=list)
    """Results of the members of the group, by rank; empty when there was none."""
    findings: list[Named] = field(default_factory=list)

    def add(self, rule: str, message: str, *turn: str, mild: bool = False) -> None:
        severity = Severity.WARNING if mild else Severity.CRITICAL
        self.findings.append(Named(rule, Finding(severity, message, turn, {})))

    def document(self) -> dict[str, Any]:
        """The report for --json, without its findings."""
        places = [
            {"name": each.name, "transport": each.transport, **each.facts} for each in self.seats
        ]
        return {"backend": self.backend, "places": places, "members": self.members}

    def show(self) -> None:
        """Prints a table of the places, and what the group measured."""
        head = ("place", "driver", "CUDA", "torch", "NCCL", "GPUs", "RDMA", "verbs", "transport")
        print_table(head, [_row(each) for each in self.seats])
        if not self.members:
            return
        size = self.members[0]["num_bytes"]
        shown = [f"{counted(len(self.members), 'member')} over {self.backend}"]
        # The slowest member's: the group has ended when it has.
        shown.append(f"connected in {max(each['connect_seconds'] for each in self.members):.2f} s")
        for name, key in (("all-reduce", "all_reduce_seconds"), ("broadcast", "broadcast_seconds")):
            seconds = max(each[key] for each in self.members)
            rate = f"{size / seconds / 1e9:.2f} GB/s"
            shown.append(f"{name} of {size / 1e6:.0f} MB {seconds * 1e3:.1f} ms ({rate})")
        print(f"\n{'; '.join(shown)}\n")


def _row(seat: Seat) -> Sequence[str]:
    facts = seat.facts
    if "error" in facts:
        return (seat.name, *["?"] * 8)
    devices: Counter[str] = Counter(facts["devices"])
    gpus = "; ".join(f"{count} x {device}" for device, count in devices.items())
    plain = [str(facts[key] or "none") for key in ("driver", "cuda", "torch", "nccl")]
    rdma, verbs = ", ".join(facts["rdma"]) or "none", "yes" if facts["verbs"] else "no"
    return (seat.name, *plain, gpus or "none", rdma, verbs, seat.transport or "-")


def examine_gpus(
    job: str | None,
    *,
    backend: str | None,
    namespace: str | None,
    context: str | None,
    num_bytes: int,
    timeout_s: float,
) -> GpuReport:
    """Examines this machine, or the pods of `job`. Raises SettingsError or Unavailable when there
    is nothing to examine.
    """
    report = GpuReport(backend or "nccl", [])
    if job is None:
        report.seats = [Seat("this machine", (sys.executable,), has_gpus=True)]
    else:
        _find_pods(report, job, namespace, context, backend)
    with ThreadPoolExecutor(max_workers=32) as pool:
        for seat, facts in zip(report.seats, pool.map(ask_facts, report.seats), strict=True):
            seat.facts = facts
    judge_facts(report)
    places = _members(report, is_local=job is None)
    if places:
        _run_group(report, places, num_bytes, timeout_s)
    return report


# The pods of a job


def _find_pods(
    report: GpuReport, job: str, namespace: str | None, context: str | None, backend: str | None
) -> None:
    where = [f"--namespace={namespace}"] if namespace else []
    where += [f"--context={context}"] if context else []
    in_python = [*where, "--", "python"]
    pods = _pods(job, where)
    for pod in sorted(pods, key=_order):
        name, phase = pod["metadata"]["name"], pod.get("status", {}).get("phase", "?")
        if phase != "Running":
            report.add("pod_not_running", f"pod {name} is {phase} and was not examined", mild=True)
            continue
        report.seats += [
            Seat(
                f"{name}/{container['name']}",
                ("kubectl", "exec", name, f"--container={container['name']}", *in_python),
                _has_gpus(container),
            )
            for container in pod["spec"]["containers"]
        ]
    if backend is None and not any(each.has_gpus for each in report.seats):
        report.backend = "gloo"  # a job without GPUs transfers over gloo
    report.seats = [each for each in report.seats if _takes_part(each, report.backend)]
    if not report.seats:
        raise Unavailable(
            f"{job}: none of its {counted(len(pods), 'pod')} runs a trainer or generator that "
            f"could be examined over {report.backend}; wait until they run"
        )


def _order(pod: Mapping[str, Any]) -> tuple[int, str]:
    role = pod["metadata"].get("labels", {}).get(ROLE_LABEL)
    return ROLES.index(role) if role in ROLES else len(ROLES), pod["metadata"]["name"]


def _has_gpus(container: Mapping[str, Any]) -> bool:
    limits = container.get("resources", {}).get("limits") or {}
    return any(name.startswith("nvidia.com/") for name in limits)


def _takes_part(seat: Seat, backend: str) -> bool:
    container = seat.name.partition("/")[2]
    computes = container == "trainer" or container.startswith("generator")
    return seat.has_gpus or (backend == "gloo" and computes)


def _pods(job: str, where: Sequence[str]) -> list[dict[str, Any]]:
    command = ["kubectl", "get", "pods", f"--selector={JOB_LABEL}={job}", "--output=json", *where]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=KUBECTL_S, check=False
        )
    except FileNotFoundError as error:
        raise SettingsError(f"{job}: kubectl, which would ask the cluster, is missing") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"kubectl has not answered within {KUBECTL_S:g} s") from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines()[-1:] or ["no reason given"])[0]
        raise Unavailable(f"kubectl: {reason}")
    pods: list[dict[str, Any]] = json.loads(answer.stdout)["items"]
    if not pods:
        raise SettingsError(f"{job}: no job of this name has pods in the cluster; see --namespace")
    return pods


# The group


def _members(report: GpuReport, *, is_local: bool) -> list[tuple[Seat, int]]:
    """Returns the place and the device of every member, by rank."""
    usable = [each for each in report.seats if "error" not in each.facts]
    if report.backend == "gloo":
        return [(each, 0) for each in usable] * (LOCAL_GLOO_MEMBERS if is_local else 1)
    return [(each, k) for each in usable for k in range(len(each.facts["devices"]))]


def _run_group(
    report: GpuReport, places: Sequence[tuple[Seat, int]], num_bytes: int, timeout_s: float
) -> None:
    """Starts all members, and notes their results or why there are none."""
    results = run_group(places, report.backend, num_bytes, timeout_s)
    for rank, ((seat, _), result) in enumerate(zip(places, results, strict=False)):
        if "error" in result:
            report.add("group_failed", f"{seat.name}, member {rank}: {result['error']}", *_REMEDIES)
        else:
            seat.transport = result["transport"]
    if not any("error" in each for each in results):
        report.members = [
            {"place": seat.name, **each} for (seat, _), each in zip(places, results, strict=True)
        ]
        judge_transports(report)


_REMEDIES = (
    "network.interface: the interface that the pods reach each other on",
    "NCCL_DEBUG=INFO in spec.env shows what NCCL tries",
)


# What is judged


def judge_facts(report: GpuReport) -> None:
    """Adds findings on what the places have."""
    known = []
    for seat in report.seats:
        if "error" in seat.facts:
            report.add("place_silent", f"{seat.name}: {seat.facts['error']}")
            continue
        known.append(seat)
        _judge_place(report, seat)
    for rule, key, label, mild in (
        ("nccl_versions_differ", "nccl", "NCCL", False),
        ("torch_versions_differ", "torch", "torch", True),
    ):
        _judge_equal(report, rule, label, {s.name: s.facts[key] for s in known}, mild=mild)
    if report.backend == "nccl":
        kinds = {
            s.name: "RDMA" if s.facts["rdma"] and s.facts["verbs"] else "sockets"
            for s in known
            if s.facts["devices"]
        }
        _judge_equal(report, "transports_differ", "networks", kinds)


def _judge_place(report: GpuReport, seat: Seat) -> None:
    facts = seat.facts
    if facts["cuda_fault"]:
        built = f"torch {facts['torch']}, built for CUDA {facts['cuda'] or 'none'}"
        report.add(
            "no_cuda",
            f"{seat.name}: no GPU can be used: {facts['cuda_fault']} ({built})",
            "the driver, the container's GPU devices and an image with torch's CUDA build",
            "--backend gloo: the same exchange between processes on CPUs",
            mild=report.backend == "gloo",
        )
    if facts["device_fault"]:
        report.add(
            "device_lost",
            f"{seat.name}: a GPU does not answer the driver: {facts['device_fault']}",
            "the node's kernel log (Xid errors); drain the node and reset the GPU",
        )
    least = LEAST_DRIVER.get((facts["cuda"] or "").partition(".")[0])
    if facts["driver"] and least and int(facts["driver"].partition(".")[0]) < least:
        report.add(
            "driver_too_old",
            f"{seat.name}: driver {facts['driver']} is older than {least}, which torch's CUDA "
            f"{facts['cuda']} build needs",
            f"the node's driver: {least} or newer",
        )
    if facts["rdma"] and not facts["verbs"]:
        report.add(
            "no_verbs",
            f"{seat.name}: has RDMA devices ({', '.join(facts['rdma'])}), but libibverbs cannot be "
            "loaded: NCCL would use sockets",
            "the image: install libibverbs1 and ibverbs-providers",
        )


def judge_transports(report: GpuReport) -> None:
    """Adds a finding when members chose different networks."""
    chosen = {
        f"{each['place']}, member {each['rank']}": ", ".join(
            part for part in each["transport"].split(", ") if part.startswith("NET/")
        )
        for each in report.members
    }
    named = {name: network for name, network in chosen.items() if network}
    _judge_equal(report, "transports_differ", "networks", named)


def _judge_equal(
    report: GpuReport,
    rule: str,
    label: str,
    by_name: Mapping[str, str | None],
    *,
    mild: bool = False,
) -> None:
    values = Counter(value for value in by_name.values() if value)
    if len(values) < 2:
        return
    shown = "; ".join(
        f"{value}: {', '.join(name for name, each in by_name.items() if each == value)}"
        for value, _ in values.most_common()
    )
    report.add(
        rule, f"{label} differ between places: {shown}", "one image for all roles", mild=mild
    )
