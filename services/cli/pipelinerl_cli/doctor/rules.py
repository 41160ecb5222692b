"""All rules by name: a new one is one function and one line here."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipelinerl_cli.doctor import fault_rules, job_rules, learning_rules, throughput_rules
from pipelinerl_cli.doctor import fault_rules as stall_rules
from pipelinerl_cli.doctor.facts import JobFacts, RunFacts
from pipelinerl_cli.doctor.finding import SEVERITIES, Finding

JOB_RULES: Mapping[str, Callable[[JobFacts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        job_rules.admission_below_places,
        job_rules.small_generator_batch,
        job_rules.unusual_share,
        job_rules.large_planned_lag,
        job_rules.no_checkpoints,
        job_rules.no_parity_check,
    )
}

RUN_RULES: Mapping[str, Callable[[RunFacts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        fault_rules.run_failed,
        stall_rules.processes_silent,
        stall_rules.nothing_succeeds,
        stall_rules.no_step_done,
        fault_rules.steps_not_finite,
        fault_rules.processes_restarted,
        fault_rules.updates_failed,
        fault_rules.groups_dropped,
        fault_rules.rollouts_fail,
        fault_rules.sequences_overlong,
        fault_rules.checkpoints_failed,
        fault_rules.evaluations_fail,
        fault_rules.memory_grows,
        learning_rules.reward_flat,
        learning_rules.ess_low,
        learning_rules.lag_high,
        learning_rules.groups_without_gradient,
        learning_rules.completions_cut_off,
        learning_rules.entropy_collapsed,
        learning_rules.ratios_clipped,
        learning_rules.gradients_scaled_down,
        throughput_rules.admission_starves_generators,
        throughput_rules.environment_starves_generators,
        throughput_rules.generation_is_slow,
        throughput_rules.training_is_slow,
        throughput_rules.kv_cache_full,
        throughput_rules.queue_too_deep,
        throughput_rules.updates_slower_than_steps,
        throughput_rules.updates_pause_decoding,
        throughput_rules.actors_uneven,
        throughput_rules.packing_uneven,
        throughput_rules.packing_loose,
        throughput_rules.load_swings,
        throughput_rules.generators_run_small_batches,
    )
}

_EXPLAINED_BY = {
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
"""A rule that says nothing new, or the wrong thing, where one of these has fired."""


class Named(NamedTuple):
    rule: str
    finding: Finding


def diagnose_job(facts: JobFacts) -> list[Named]:
    """Findings on the job file, the most severe first."""
    return _ordered(
        [
            Named(name, finding)
            for name, rule in JOB_RULES.items()
            if (finding := rule(facts)) is not None
        ]
    )


def diagnose_run(facts: RunFacts) -> list[Named]:
    """Findings on the run and on its job, the most severe first; among equals faults, learning,
    time, the job.
    """
    of_run = [
        Named(name, finding)
        for name, rule in RUN_RULES.items()
        if (finding := rule(facts)) is not None
    ]
    fired = {named.rule for named in of_run}
    found = [*of_run, *diagnose_job(facts.job)]
    return _ordered(
        [named for named in found if not fired.intersection(_EXPLAINED_BY.get(named.rule, ()))]
    )


def _ordered(findings: list[Named]) -> list[Named]:
    return sorted(findings, key=lambda named: SEVERITIES.index(named.finding.severity))
