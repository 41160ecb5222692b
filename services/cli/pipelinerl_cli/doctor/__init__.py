"""`pipelinerl doctor DIR|FILE`: what slows a run down or makes it fail, which setting to
change, and the numbers behind it. `pipelinerl doctor gpu --local|JOB`: whether GPUs can be used and
reach each other, before anything loads.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_cli.terminal import at_least_one

if TYPE_CHECKING:
    from pipelinerl_cli.doctor.finding import Named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        type=Path,
        metavar="DIR|FILE|gpu",
        help="a run's folder, a job file, or gpu: the GPUs of this machine or of a job's pods",
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON on standard output")
    gpu = parser.add_argument_group("only with gpu")
    gpu.add_argument(
        "job", nargs="?", metavar="JOB", help="name of a PipelineRLJob whose pods are examined"
    )
    gpu.add_argument("--local", action="store_true", help="examine this machine")
    gpu.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        help="default nccl, for a job without GPUs gloo; gloo exchanges between CPUs",
    )
    gpu.add_argument(
        "--megabytes", type=at_least_one, default=64, metavar="N", help="size of a message"
    )
    gpu.add_argument(
        "--timeout",
        type=at_least_one,
        default=60,
        metavar="S",
        help="seconds that the exchange may take",
    )
    gpu.add_argument("-n", "--namespace", metavar="NAME", help="the job's namespace")
    gpu.add_argument("--context", metavar="NAME", help="context of kubectl's configuration")


def run(args: argparse.Namespace) -> int:
    """Prints findings, the most severe first. Raises SettingsError when there is nothing to
    examine.
    """
    from pipelinerl_cli.doctor.rules import diagnose_job, diagnose_run, load_facts
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_common.runs.facts import JobFacts
    from pipelinerl_common.settings import load_job
    from pipelinerl_common.text import did_you_mean_folder

    subject: Path = args.subject
    if str(subject) == "gpu":
        return _run_gpu(args)
    if args.local or args.job:
        flag = "--local" if args.local else args.job
        raise SettingsError(f"{flag} belongs to `pipelinerl doctor gpu`, not to {subject}")
    if subject.is_dir():
        findings = diagnose_run(load_facts(subject))
    elif subject.exists():
        findings = diagnose_job(JobFacts(load_job(subject)))
    else:
        raise SettingsError(
            f"{subject}: does not exist; give a run's folder or a job file, not the name of a job "
            f"in a cluster{did_you_mean_folder(subject)}"
        )
    if args.json:
        document = {"subject": str(subject), "findings": [_record(named) for named in findings]}
        print(json.dumps(document, indent=1))
        return 0
    _print(findings)
    return 0


def _run_gpu(args: argparse.Namespace) -> int:
    """Status 1 with a critical finding, so that a script can stop before a job is started."""
    from pipelinerl_cli.doctor.gpu import examine_gpus
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_common.judgements import Severity

    if args.local == (args.job is not None):
        raise SettingsError("gpu: give either --local or the name of a job in the cluster")
    report = examine_gpus(
        args.job,
        backend=args.backend,
        namespace=args.namespace,
        context=args.context,
        num_bytes=args.megabytes << 20,
        timeout_s=args.timeout,
    )
    if args.json:
        found = [_record(named) for named in report.findings]
        print(json.dumps({**report.document(), "findings": found}, indent=1))
    else:
        report.show()
        _print(report.findings)
    return int(any(named.finding.severity is Severity.CRITICAL for named in report.findings))


def _print(findings: "Sequence[Named]") -> None:
    from pipelinerl_common.text import counted

    for named in findings:
        print(_text(named))
    print(counted(len(findings), "finding") if findings else "nothing found")


def _record(named: "Named") -> dict[str, Any]:
    finding = named.finding
    numbers = {name: value if value == value else None for name, value in finding.numbers.items()}
    return {
        "rule": named.rule,
        "severity": finding.severity.value,
        "message": finding.message,
        "turn": list(finding.turn),
        "numbers": numbers,
    }


def _text(named: "Named") -> str:
    finding = named.finding
    numbers = "  ".join(f"{name}={value:.4g}" for name, value in finding.numbers.items())
    turn = "\n".join(f"    -> {advice}" for advice in finding.turn)
    head = f"{finding.severity.upper():8}  {finding.message}  [{named.rule}]"
    return "\n".join(filter(None, (head, turn, f"    {numbers}" if numbers else ""))) + "\n"
