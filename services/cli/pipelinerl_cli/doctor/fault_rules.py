"""Rules on what went wrong in a run, and on why it makes no progress at all."""

from collections.abc import Mapping
from itertools import groupby

from pipelinerl_cli.doctor.finding import Finding, judge
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
from pipelinerl_common.runs.evaluations import is_evaluation
from pipelinerl_common.runs.facts import RunFacts, mean
from pipelinerl_common.runs.records import SILENCE_LIMIT_S
from pipelinerl_common.text import counted, nouns

SLOW_START_S = 600.0
"""A model that loads for longer is worth a look, whatever the job allows."""
TRAINING_S = 120.0
"""Time of a first step beside its trajectories: compilation, the check of the log-probabilities."""
LATE_S = 60.0
"""An evaluator ends its evaluation itself at evaluation.timeoutSeconds; one that is this much later
hangs.
"""
_LONG_RUN_S = 600.0
_OTHER_RULES_DROPS = {"zero_advantage"}
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
        ("logs/ in the run's folder: the last lines of the process that failed",),
        {"steps": num_steps, "restarts": facts.summary["restarts"]},
    )


def processes_silent(facts: RunFacts) -> Finding | None:
    count = len(facts.silent)
    if not count:
        return None
    listed = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in facts.silent.items())
    return Finding(
        Severity.CRITICAL,
        f"{counted(count, 'process', 'processes')} "
        f"{nouns(count, 'runs but has', 'run but have')} not answered: {listed}",
        (
            f"wait: a generator is ended after {SILENCE_LIMIT_S:.0f} s without an answer, and "
            "restarted",
            "what stopped them: a debugger, SIGSTOP, a machine that swaps, a GPU that hangs; their "
            "logs in logs/",
        ),
        {f"silent_seconds_{name}": seconds for name, seconds in facts.silent.items()},
    )


def device_lost(facts: RunFacts) -> Finding | None:
    if not facts.lost_devices:
        return None
    listed = ", ".join(f"{name} ({reason})" for name, reason in facts.lost_devices.items())
    return Finding(
        Severity.CRITICAL,
        f"{counted(len(facts.lost_devices), 'process', 'processes')} reported a GPU that does not "
        f"answer: {listed}",
        (
            "the machine's kernel log (dmesg): Xid errors; reset the GPU or leave it out with "
            "CUDA_VISIBLE_DEVICES",
            "pipelinerl doctor gpu --local: which device, and whether the others can be used",
        ),
        {"processes": len(facts.lost_devices)},
    )


def nothing_succeeds(facts: RunFacts) -> Finding | None:
    errors, failed = facts.summary["rollout_errors"], facts.total("actor", "groups_failed_total")
    if facts.total("actor", "samples_generated_total") or not failed:
        return None
    total = sum(errors.values())
    return Finding(
        Severity.CRITICAL,
        f"no trajectory has succeeded, {counted(total, 'attempt')} failed: {_errors(facts)}",
        _error_advice(errors),
        {"errors": total, "groups_failed": failed},
    )


def no_step_done(facts: RunFacts) -> Finding | None:
    """As severe as it is late, while the run continues."""
    if facts.history.steps:
        return None
    if facts.status == "running":
        return _late(facts)
    seconds, generated = facts.history.seconds, facts.total("actor", "tokens_generated_total")
    if generated:
        where = f"{counted(generated, 'token')} were generated"
        turn: tuple[str, ...] = ("logs/ of preprocessor and trainer",)
    else:
        where = "no tokens were generated"
        startup = "actors.startupTimeoutSeconds: long enough to load the model"
        turn = ("logs/ of the generators", startup)
    return Finding(
        Severity.CRITICAL,
        f"no optimizer step was done in {seconds:.0f} s; {where}",
        turn,
        {"seconds": seconds, "tokens_generated": generated},
    )


def _late(facts: RunFacts) -> Finding:
    spec, serving = facts.job.spec, facts.serving_seconds
    if serving is None:
        waited, limit, slow = (
            facts.session_seconds,
            spec.actors.startup_timeout_seconds,
            SLOW_START_S,
        )
        phase, bound = "the generators do not serve yet", "actors.startupTimeoutSeconds"
        turn = "logs/ of prepare and of the generators: their progress"
    else:
        waited, limit, slow = serving, spec.task.timeout_seconds + TRAINING_S, TRAINING_S
        phase = "the first batch is generated and trained"
        bound = "task.timeoutSeconds and a step"
        turn = "logs/ of actors, preprocessor and trainer"
    severity = Severity.WARNING if waited > slow else Severity.ADVICE
    return Finding(
        Severity.CRITICAL if waited > limit else severity,
        f"no optimizer step yet: {phase}, for {waited:.0f} s by now, which may take {limit:.0f} s "
        f"({bound})",
        (turn,),
        {"seconds": waited, "allowed_seconds": limit},
    )


def steps_not_finite(facts: RunFacts) -> Finding | None:
    skipped = facts.total("trainer", "skipped_steps_total")
    batches = sum(step.values.get("non_finite_micro_batches", 0.0) for step in facts.history.steps)
    return judge(
        STEPS_SKIPPED,
        skipped + batches,
        f"{counted(skipped, 'step')} skipped and "
        f"{counted(batches, 'micro-batch', 'micro-batches')} left out because "
        f"{STEPS_SKIPPED.meaning}",
        {"skipped_steps": skipped, "non_finite_micro_batches": batches},
    )


def processes_restarted(facts: RunFacts) -> Finding | None:
    restarts, by_process = facts.summary["restarts"], facts.summary["restarts_by_process"]
    return judge(
        RESTARTS,
        restarts,
        f"processes were restarted {counted(restarts, 'time')}: "
        f"{_by_count(by_process) or 'unknown which'}",
        {
            "restarts": restarts,
            **{f"restarts_{name}": count for name, count in by_process.items()},
        },
    )


def updates_failed(facts: RunFacts) -> Finding | None:
    failures, updates = facts.summary["weight_update_failures"], facts.summary["weight_updates"]
    if not failures:
        return None
    is_beyond = UPDATES_FAIL.is_beyond(failures / (failures + updates))
    return Finding(
        UPDATES_FAIL.severity if is_beyond else Severity.ADVICE,
        f"{failures} of {counted(failures + updates, 'weight update')} failed; "
        f"{UPDATES_FAIL.meaning}",
        UPDATES_FAIL.remedies,
        {"failures": failures, "updates": updates},
    )


def groups_dropped(facts: RunFacts) -> Finding | None:
    counts = facts.summary["dropped_groups"].items()
    dropped = {reason: count for reason, count in counts if reason not in _OTHER_RULES_DROPS}
    total, trained = sum(dropped.values()), facts.total("preprocessor", "groups_trained_total")
    share = total / max(total + trained, 1)
    advice = [_DROP_ADVICE[reason] for reason in _most_first(dropped) if reason in _DROP_ADVICE]
    return judge(
        DROPS,
        share,
        f"{100 * share:.0f} % of the groups were generated for nothing: {_by_count(dropped)}",
        {"share": share, **{f"dropped_{reason}": count for reason, count in dropped.items()}},
        advice or ["logs/ of the preprocessor"],
    )


def rollouts_fail(facts: RunFacts) -> Finding | None:
    errors = facts.summary["rollout_errors"]
    total, samples = sum(errors.values()), facts.total("actor", "samples_generated_total")
    return judge(
        ROLLOUT_ERRORS,
        total / max(samples, 1),
        f"{counted(total, 'rollout error')} for {counted(samples, 'trajectory', 'trajectories')}: "
        f"{_errors(facts)}",
        {"errors": total, "samples": samples},
        _error_advice(errors),
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


def checkpoints_failed(facts: RunFacts) -> Finding | None:
    failures = facts.total("trainer", "checkpoint_failures_total")
    return judge(
        CHECKPOINTS_FAIL,
        failures,
        f"{counted(failures, 'checkpoint')} could not be written: {CHECKPOINTS_FAIL.meaning}",
        {"checkpoint_failures": failures},
    )


def evaluations_fail(facts: RunFacts) -> Finding | None:
    """Evaluations that the job asks for fail, or one does not end, or the last step has none."""
    settings, steps = facts.job.spec.evaluation, facts.history.steps
    if settings is None:
        return None
    failed = facts.summary["evaluations_failed"]
    done = facts.total(EVALUATOR, "evaluations_total{outcome=done}")
    numbers = {"failed": float(failed), "done": done}
    problems, turn = [], ["logs/evaluator-0.log: why there is no result"]
    if failed:
        problems.append(f"{failed} of {counted(failed + done, 'evaluation')} failed")
    if facts.evaluating is not None and facts.evaluating[1] > settings.timeout_seconds + LATE_S:
        step, numbers["seconds"] = facts.evaluating
        problems.append(f"that of step {step} has not ended after {numbers['seconds']:.0f} s")
    if problems:
        turn += [
            f"evaluation.timeoutSeconds: higher than {settings.timeout_seconds:g} where one takes "
            "longer",
            "evaluation.sets: a smaller numPrompts",
        ]
    ended = {record.step for record in facts.records if is_evaluation(record)}
    if facts.status == "finished" and steps and steps[-1].step not in ended:
        problems.append(f"step {steps[-1].step}, the last one, was not evaluated")
        turn.append("the same `pipelinerl up` again: it evaluates the last step")
    if not problems:
        return None
    message = f"evaluation: {'; '.join(problems)}"
    return Finding(Severity.WARNING, message, tuple(turn), numbers)


def memory_grows(facts: RunFacts) -> Finding | None:
    """The process whose memory grew most, in runs of at least 10 minutes."""
    seconds = facts.history.seconds
    if seconds < _LONG_RUN_S:
        return None
    worst, growth, now = "", 0.0, 0.0
    measured = [record for record in facts.records if "memory_bytes" in record.values]
    measured.sort(key=lambda each: each.instance)
    for instance, records in groupby(measured, key=lambda each: each.instance):
        points = [
            (facts.history.time.at(record.time) / seconds, record.values["memory_bytes"])
            for record in records
        ]
        early = mean(value for place, value in points if 0.25 <= place < 0.5)
        late = mean(value for place, value in points if place >= 0.75)
        if early > 0 and late / early > growth:
            worst, growth, now = instance, late / early, late
    return judge(
        MEMORY_GROWS,
        growth,
        f"the memory of {worst} grew {growth:.1f} times since the run's second quarter, to "
        f"{now / 2**30:.2f} GiB",
        {"growth": growth, "memory_bytes": now},
        (
            f"{worst}: a larger memory limit for now, and its logs",
            "preprocessor.ringBufferGroups: lower if it is the preprocessor",
        ),
    )


def _most_first(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=lambda name: -counts[name])


def _by_count(counts: Mapping[str, int]) -> str:
    """Example: "stale 640, expired 10"."""
    return ", ".join(f"{name} {counts[name]}" for name in _most_first(counts))


def _error_advice(errors: Mapping[str, int]) -> tuple[str, ...]:
    """Remedies of rollout errors, the most frequent first."""
    found = (
        _ERROR_ADVICE.get(reason) or _ERROR_ADVICE.get(reason.partition("_")[0])
        for reason in _most_first(errors)
    )
    known = tuple(dict.fromkeys(advice for advice in found if advice))
    return known or ("logs/actor-0.log: its lines on them",)


def _errors(facts: RunFacts) -> str:
    """Counts by reason with the actors' log messages. Example: "http_400 640 (prompt of ...)"."""
    errors, messages = facts.summary["rollout_errors"], facts.messages
    return ", ".join(
        f"{reason} {errors[reason]}" + (f" ({messages[reason]})" if reason in messages else "")
        for reason in _most_first(errors)
    )
