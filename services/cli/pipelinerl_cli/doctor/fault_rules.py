"""Rules on why a run does not get on at all.

Rules on what went wrong in a run.
"""

from collections.abc import Mapping
from itertools import groupby

from pipelinerl_cli.doctor.facts import RunFacts, mean
from pipelinerl_cli.doctor.finding import Finding
from pipelinerl_cli.runs.evaluations import is_evaluation
from pipelinerl_cli.runs.records import SILENCE_LIMIT_S
from pipelinerl_common.judgements import (
    CHECKPOINTS_FAIL,
    DROPS,
    MEMORY_GROWS,
    RESTARTS,
    ROLLOUT_ERRORS,
    STEPS_SKIPPED,
    UPDATES_FAIL,
    Severity,
)
from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.text import counted, nouns

SLOW_START_S = 600.0
"""Loading a model that takes longer is worth a look, whatever is allowed."""
TRAINING_S = 120.0
"""What a first step may take beside its trajectories: compilation, the check of the
log-probabilities.
"""
_ERROR_ADVICE: Mapping[str, str] = {
    "http": "model.maxModelLen: at least a prompt and task.sampling.maxTokens",
    "task": "task: see the traceback in logs/actor-0.log",
    "verifier_timeout": "task.verifierTimeoutSeconds: higher, or a faster verify",
    "verifier": "task: see what its verify raises in logs/actor-0.log",
    "timeout": "task.timeoutSeconds: higher than the longest trajectory takes",
    "non": "task: rewards and metrics must be finite",
    "bad_verdict": "task: its verify must return a Verdict",
    "generator": "logs/ of the generators; task.maxRetries: higher",
}
"""By the reason, or the reason's first word."""


def error_advice(reasons: Mapping[str, int]) -> tuple[str, ...]:
    """For rollout errors, the most frequent first."""
    by_count = sorted(reasons, key=lambda reason: -reasons[reason])
    found = (
        _ERROR_ADVICE.get(reason) or _ERROR_ADVICE.get(reason.partition("_")[0])
        for reason in by_count
    )
    return tuple(dict.fromkeys(advice for advice in found if advice)) or (
        "logs/actor-0.log: what it says of them",
    )


def told_errors(facts: RunFacts) -> str:
    """Counts by reason, the most frequent first, with what the actors' logs say. Example: "http_400
    640 (prompt of ...)".
    """
    errors = facts.summary["rollout_errors"]
    by_count = sorted(errors.items(), key=lambda each: -each[1])
    said = {
        reason: f" ({facts.messages[reason]})" if reason in facts.messages else ""
        for reason in errors
    }
    return ", ".join(f"{reason} {count}{said[reason]}" for reason, count in by_count)


def nothing_succeeds(facts: RunFacts) -> Finding | None:
    errors, samples = (
        facts.summary["rollout_errors"],
        facts.total("actor", "samples_generated_total"),
    )
    if samples or not facts.total("actor", "groups_failed_total"):
        return None
    total = sum(errors.values())
    return Finding(
        Severity.CRITICAL,
        f"no trajectory has succeeded, {counted(total, 'attempt')} failed: {told_errors(facts)}",
        error_advice(errors),
        {"errors": total, "groups_failed": facts.total("actor", "groups_failed_total")},
    )


def processes_silent(facts: RunFacts) -> Finding | None:
    if not facts.silent:
        return None
    listed = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in facts.silent.items())
    return Finding(
        Severity.CRITICAL,
        f"{counted(len(facts.silent), 'process', 'processes')} "
        f"{nouns(len(facts.silent), 'runs but has', 'run but have')} not "
        f"answered: {listed}",
        (
            f"wait: a generator is ended after {SILENCE_LIMIT_S:.0f} s without an answer, and started again",
            "what stopped them: a debugger, SIGSTOP, a machine that swaps, a GPU that hangs; their "
            "logs in logs/",
        ),
        {f"silent_seconds_{name}": seconds for name, seconds in facts.silent.items()},
    )


def no_step_done(facts: RunFacts) -> Finding | None:
    """Of a run that goes on, as severe as it is late."""
    if facts.history.steps:
        return None
    if facts.status == "running":
        return _late(facts)
    generated = facts.total("actor", "tokens_generated_total")
    where = (
        f"{counted(generated, 'token')} were generated" if generated else "no tokens were generated"
    )
    return Finding(
        Severity.CRITICAL,
        f"no optimizer step was done in {facts.history.seconds:.0f} s; {where}",
        ("logs/ of preprocessor and trainer",)
        if generated
        else (
            "logs/ of the generators",
            "actors.startupTimeoutSeconds: long enough to load the model",
        ),
        {"seconds": facts.history.seconds, "tokens_generated": generated},
    )


def _late(facts: RunFacts) -> Finding:
    spec, serving = facts.job.spec, facts.serving_seconds
    if serving is None:
        waited, limit, slow = (
            facts.session_seconds,
            spec.actors.startup_timeout_seconds,
            SLOW_START_S,
        )
        phase, turn = (
            "the generators do not serve yet",
            "logs/ of prepare and of the generators: how far they are",
        )
        bound = "actors.startupTimeoutSeconds"
    else:
        waited, limit, slow = serving, spec.task.timeout_seconds + TRAINING_S, TRAINING_S
        phase, turn = (
            "the first batch is generated and trained",
            "logs/ of actors, preprocessor and trainer",
        )
        bound = "task.timeoutSeconds and a step"
    severity = (
        Severity.CRITICAL
        if waited > limit
        else Severity.WARNING
        if waited > slow
        else Severity.ADVICE
    )
    return Finding(
        severity,
        f"no optimizer step yet: {phase}, for {waited:.0f} s by now, which may take {limit:.0f} s "
        f"({bound})",
        (turn,),
        {"seconds": waited, "allowed_seconds": limit},
    )


LATE_S = 60.0
"""An evaluator ends its evaluation itself at evaluation.timeoutSeconds; one that is later than this
hangs.
"""
_LONG_RUN_S = 600.0
_OTHER_RULES_DROPS = {"zero_advantage"}
_DROP_ADVICE: Mapping[str, str] = {
    "stale": "staleness.policy: one that admits less (slack, areal), or a higher eta",
    "cancelled": "staleness.policy: one that does not cancel (slack, areal), or a higher eta",
    "ring_buffer": "preprocessor.ringBufferGroups: higher, or unset",
    "expired": "preprocessor.leaseSeconds: higher than the longest group takes",
    "failed": "task: see the rollout errors in the actors' logs",
    "reference": "reference.replicas: more",
    "too_few_samples": "task.minGroupFraction: higher, so that small groups are tried again",
    "no_tokens": "model.maxModelLen and trainers.microBatchTokens: higher",
    "non_finite": "task: rewards must be finite",
    "temperature": "task.sampling.temperature: the actors must use the job's",
}


def run_failed(facts: RunFacts) -> Finding | None:
    if facts.status != "failed":
        return None
    num_steps = len(facts.history.steps)
    return Finding(
        Severity.CRITICAL,
        f"the run failed after {counted(num_steps, 'step')}: {facts.failure or 'its logs say why'}",
        ("logs/ in the run's folder: the last lines of what failed",),
        {"steps": num_steps, "restarts": facts.summary["restarts"]},
    )


def processes_restarted(facts: RunFacts) -> Finding | None:
    by_process = facts.summary["restarts_by_process"]
    if not RESTARTS.is_beyond(facts.summary["restarts"]):
        return None
    listed = ", ".join(
        f"{name} {count}" for name, count in sorted(by_process.items(), key=lambda each: -each[1])
    )
    return Finding(
        RESTARTS.severity,
        f"processes were restarted {counted(facts.summary['restarts'], 'time')}: "
        f"{listed or 'unknown which'}",
        RESTARTS.remedies,
        {
            "restarts": facts.summary["restarts"],
            **{f"restarts_{name}": count for name, count in by_process.items()},
        },
    )


def updates_failed(facts: RunFacts) -> Finding | None:
    failures, updates = facts.summary["weight_update_failures"], facts.summary["weight_updates"]
    if not failures:
        return None
    share = failures / (failures + updates)
    return Finding(
        UPDATES_FAIL.severity if UPDATES_FAIL.is_beyond(share) else Severity.ADVICE,
        f"{failures} of {counted(failures + updates, 'weight update')} failed; "
        f"{UPDATES_FAIL.meaning}",
        UPDATES_FAIL.remedies,
        {"failures": failures, "updates": updates},
    )


def groups_dropped(facts: RunFacts) -> Finding | None:
    dropped = {
        reason: n
        for reason, n in facts.summary["dropped_groups"].items()
        if reason not in _OTHER_RULES_DROPS
    }
    total, trained = sum(dropped.values()), facts.total("preprocessor", "groups_trained_total")
    if not total or not DROPS.is_beyond(total / (total + trained)):
        return None
    by_count = sorted(dropped.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{reason} {count}" for reason, count in by_count)
    return Finding(
        DROPS.severity,
        f"{100 * total / (total + trained):.0f} % of the groups were generated in vain: {listed}",
        tuple(_DROP_ADVICE[reason] for reason, _ in by_count if reason in _DROP_ADVICE)
        or ("logs/ of the preprocessor",),
        {
            "share": total / (total + trained),
            **{f"dropped_{reason}": float(count) for reason, count in by_count},
        },
    )


def rollouts_fail(facts: RunFacts) -> Finding | None:
    errors, samples = (
        facts.summary["rollout_errors"],
        facts.total("actor", "samples_generated_total"),
    )
    total = sum(errors.values())
    if not ROLLOUT_ERRORS.is_beyond(total / max(samples, 1)):
        return None
    return Finding(
        ROLLOUT_ERRORS.severity,
        f"{counted(total, 'rollout error')} for {counted(samples, 'trajectory', 'trajectories')}: "
        f"{told_errors(facts)}",
        error_advice(errors),
        {"errors": total, "samples": samples},
    )


def sequences_overlong(facts: RunFacts) -> Finding | None:
    count = facts.total("preprocessor", "sequences_overlong_total")
    if not count:
        return None
    return Finding(
        Severity.WARNING,
        f"{counted(count, 'trajectory', 'trajectories')} longer than the model or a micro-batch "
        "takes, not trained",
        (
            "model.maxModelLen and trainers.microBatchTokens: higher",
            "task.sampling.maxTokens: lower",
        ),
        {"sequences_overlong": count},
    )


def steps_not_finite(facts: RunFacts) -> Finding | None:
    skipped = facts.total("trainer", "skipped_steps_total")
    batches = sum(step.values.get("non_finite_micro_batches", 0.0) for step in facts.history.steps)
    if not STEPS_SKIPPED.is_beyond(skipped + batches):
        return None
    return Finding(
        STEPS_SKIPPED.severity,
        f"{counted(skipped, 'step')} skipped and "
        f"{counted(batches, 'micro-batch', 'micro-batches')} left out because "
        f"{STEPS_SKIPPED.meaning}",
        STEPS_SKIPPED.remedies,
        {"skipped_steps": skipped, "non_finite_micro_batches": batches},
    )


def checkpoints_failed(facts: RunFacts) -> Finding | None:
    failures = facts.total("trainer", "checkpoint_failures_total")
    if not CHECKPOINTS_FAIL.is_beyond(failures):
        return None
    return Finding(
        CHECKPOINTS_FAIL.severity,
        f"{counted(failures, 'checkpoint')} could not be written: {CHECKPOINTS_FAIL.meaning}",
        CHECKPOINTS_FAIL.remedies,
        {"checkpoint_failures": failures},
    )


def evaluations_fail(facts: RunFacts) -> Finding | None:
    """Of a job that asks for evaluations: they fail, one does not end, or the last step has none."""
    settings, steps = facts.job.spec.evaluation, facts.history.steps
    if settings is None:
        return None
    failed, done = (
        facts.summary["evaluations_failed"],
        facts.total(EVALUATOR, "evaluations_total{outcome=done}"),
    )
    told, turn = [], ["logs/evaluator-0.log: why there is no result"]
    if failed:
        told.append(f"{failed} of {counted(failed + done, 'evaluation')} failed")
    numbers = {"failed": float(failed), "done": done}
    if facts.evaluating is not None and facts.evaluating[1] > settings.timeout_seconds + LATE_S:
        step, numbers["seconds"] = facts.evaluating
        told.append(f"that of step {step} has not ended after {numbers['seconds']:.0f} s")
    if told:
        turn.append(
            f"evaluation.timeoutSeconds: higher than {settings.timeout_seconds:g} where one takes "
            "longer"
        )
        turn.append("evaluation.sets: a smaller numPrompts")
    ended = {record.step for record in facts.records if is_evaluation(record)}
    if facts.status == "finished" and steps and steps[-1].step not in ended:
        told.append(f"step {steps[-1].step}, the last one, was not evaluated")
        turn.append("the same `pipelinerl up` again: it evaluates the last step")
    return (
        Finding(Severity.WARNING, f"evaluation: {'; '.join(told)}", tuple(turn), numbers)
        if told
        else None
    )


def memory_grows(facts: RunFacts) -> Finding | None:
    """The process whose memory grew most, in runs of at least 10 minutes."""
    seconds = facts.history.seconds
    if seconds < _LONG_RUN_S:
        return None
    worst, growth, now = "", 0.0, 0.0
    measured = sorted(
        (record for record in facts.records if "memory_bytes" in record.values),
        key=lambda each: each.instance,
    )
    for instance, records in groupby(measured, key=lambda each: each.instance):
        points = [
            (facts.history.time.at(record.time) / seconds, record.values["memory_bytes"])
            for record in records
        ]
        early = mean(value for place, value in points if 0.25 <= place < 0.5)
        late = mean(value for place, value in points if place >= 0.75)
        if early > 0 and late / early > growth:
            worst, growth, now = instance, late / early, late
    if not MEMORY_GROWS.is_beyond(growth):
        return None
    return Finding(
        MEMORY_GROWS.severity,
        f"the memory of {worst} grew {growth:.1f} times since the run's second quarter, to "
        f"{now / 2**30:.2f} GiB",
        (
            f"{worst}: a larger memory limit for now, and its logs",
            "preprocessor.ringBufferGroups: lower if it is the preprocessor",
        ),
        {"growth": growth, "memory_bytes": now},
    )
