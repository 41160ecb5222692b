"""`pipelinerl doctor DIR|FILE`: what slows a run down or makes it fail, which setting to
change, and the numbers behind it.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelinerl_cli.doctor.finding import Named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", type=Path, metavar="DIR|FILE", help="a run's folder, or a job file"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Prints findings, the most severe first. Raises SettingsError when there is nothing to
    examine.
    """
    from pipelinerl_cli.doctor.rules import diagnose_job, diagnose_run, load_facts
    from pipelinerl_common.errors import SettingsError
    from pipelinerl_common.runs.facts import JobFacts
    from pipelinerl_common.settings import load_job
    from pipelinerl_common.text import counted, did_you_mean_folder

    subject: Path = args.subject
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
    head = f"{finding.severity.upper():8}  {finding.message}  [{named.rule}]"
    return f"{head}\n{turn}\n    {numbers}\n"
