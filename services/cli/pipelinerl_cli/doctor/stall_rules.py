"""Rules on why a run does not get on at all."""

from collections.abc import Mapping

from pipelinerl_cli.doctor.finding import Finding, Severity
from pipelinerl_cli.doctor.run_facts import RunFacts
from pipelinerl_cli.up.silence import LIMIT_S
from pipelinerl_common.words import counted, nouns

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
            f"wait: a generator is ended after {LIMIT_S:.0f} s without an answer, and started again",
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
