"""All rules by name: every public function of the rule modules is one, in order of importance."""

import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelinerl_cli.doctor import fault_rules, job_rules, learning_rules, throughput_rules
from pipelinerl_cli.doctor.finding import SEVERITIES, Finding, Named
from pipelinerl_cli.run_folder import load_run
from pipelinerl_common.runs.facts import JobFacts, RunFacts


def _rules(*modules: ModuleType) -> dict[str, Any]:
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }


JOB_RULES: Mapping[str, Callable[[JobFacts], Finding | None]] = _rules(job_rules)
RUN_RULES: Mapping[str, Callable[[RunFacts], Finding | None]] = _rules(
    fault_rules, learning_rules, throughput_rules
)
EXPLAINED_BY = {
    "small_generator_batch": ("generators_run_small_batches",),
    "no_step_done": ("processes_silent", "nothing_succeeds", "run_failed"),
    "rollouts_fail": ("nothing_succeeds",),
    "groups_dropped": ("nothing_succeeds",),
    **dict.fromkeys(
        (
            "updates_failed",
            "admission_starves_generators",
            "environment_starves_generators",
            "generation_is_slow",
            "training_is_slow",
            "queue_too_deep",
            "actors_uneven",
            "load_swings",
            "generators_run_small_batches",
        ),
        ("processes_silent",),
    ),
}
"""A rule whose finding is nothing new, or wrong, when one of these rules has a finding."""


def diagnose_job(facts: JobFacts) -> list[Named]:
    """Findings on the job file, the most severe first."""
    found = ((name, rule(facts)) for name, rule in JOB_RULES.items())
    return _ordered([Named(name, finding) for name, finding in found if finding is not None])


def diagnose_run(facts: RunFacts) -> list[Named]:
    """Findings on the run and on its job, the most severe first; among equals faults, learning,
    time, the job.
    """
    found = ((name, rule(facts)) for name, rule in RUN_RULES.items())
    of_run = [Named(name, finding) for name, finding in found if finding is not None]
    names = {named.rule for named in of_run}
    return _ordered(
        [
            named
            for named in [*of_run, *diagnose_job(facts.job)]
            if not names.intersection(EXPLAINED_BY.get(named.rule, ()))
        ]
    )


def _ordered(findings: list[Named]) -> list[Named]:
    return sorted(findings, key=lambda named: SEVERITIES.index(named.finding.severity))


def load_facts(root: Path) -> RunFacts:
    """Raises SettingsError when `root` is not a run's folder."""
    run = load_run(root)
    now = time.time() if run.is_live else None
    return RunFacts.of(root, run.job, run.status, failure=run.failure, now=now)
