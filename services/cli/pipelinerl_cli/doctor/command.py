"""`pipelinerl doctor DIR|job.yaml`: what holds a run up, which parameter to turn, and the numbers
that say so.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelinerl_cli.doctor.rules import Named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", type=Path, metavar="DIR|JOB", help="a run's folder, or a job file"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Prints findings, the most severe first. Raises SettingsError when there is nothing to
    examine.
    """
    from pipelinerl_cli.doctor.facts import JobFacts, load_facts
    from pipelinerl_cli.doctor.rules import diagnose_job, diagnose_run
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_common.settings import load_job
    from pipelinerl_common.text import counted, did_you_mean_folder

    subject: Path = args.subject
    if not subject.exists():
        raise SettingsError(
            f"{subject}: does not exist; give a run's folder or a job "
            f"file{did_you_mean_folder(subject)}"
        )
    findings = (
        diagnose_run(load_facts(subject))
        if subject.is_dir()
        else diagnose_job(JobFacts(load_job(subject)))
    )
    if args.json:
        print(
            json.dumps(
                {"subject": str(subject), "findings": [_record(named) for named in findings]},
                indent=1,
            )
        )
        return 0
    for named in findings:
        print(_text(named))
    print(counted(len(findings), "finding") if findings else "nothing found")
    return 0


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
    return (
        f"{finding.severity.upper():8}  {finding.message}  [{named.rule}]\n{turn}\n    {numbers}\n"
    )
