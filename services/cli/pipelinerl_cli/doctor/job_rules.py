"""Rules on a job file. Rules of thumb are those of users of in-flight RL, not results."""

from pipelinerl_cli.doctor.finding import Finding, judge
from pipelinerl_common.judgements import PLANNED_LAG, SMALL_BATCH, STABLE_SHARE, Severity
from pipelinerl_common.runs.facts import JobFacts
from pipelinerl_common.text import counted


def admission_below_places(facts: JobFacts) -> Finding | None:
    if facts.max_admitted >= facts.num_places:
        return None
    has_eta = "eta" in facts.spec.staleness.parse().parameter_names()
    return Finding(
        Severity.WARNING,
        f"the staleness policy lets {counted(facts.max_admitted, 'sequence')} be outstanding, but "
        f"the generators have {counted(facts.num_places, 'place')}: some always stay empty",
        (
            "staleness.eta: higher" if has_eta else "the staleness policy's limit: higher",
            "algorithm.groupsPerStep: higher",
            "actors.generator.maxRunningRequests: lower",
        ),
        {"max_admitted": facts.max_admitted, "places": facts.num_places},
    )


def small_generator_batch(facts: JobFacts) -> Finding | None:
    if facts.num_generating == 0:
        return None
    per_gpu = facts.num_places / facts.num_generating
    return judge(
        SMALL_BATCH,
        per_gpu,
        f"a generating GPU decodes at most {counted(per_gpu, 'sequence')} at once; throughput "
        f"grows almost in proportion up to about {SMALL_BATCH.limit:g}",
        {"batch_per_gpu": per_gpu, "least": SMALL_BATCH.limit},
        (
            "actors.generator.maxRunningRequests: higher",
            "actors.replicas: fewer, for the same lag (pipelinerl plan)",
        ),
    )


def unusual_share(facts: JobFacts) -> Finding | None:
    """A job with `autoscale` finds its own share."""
    if facts.num_generating == 0 or facts.spec.autoscale.enabled:
        return None
    num_gpus = facts.num_generating + facts.num_training
    share = facts.num_generating / num_gpus
    least, most = STABLE_SHARE
    if least - 1 / num_gpus < share < most + 1 / num_gpus:
        return None
    direction = "more" if share < least else "fewer"
    return Finding(
        Severity.ADVICE,
        f"{100 * share:.0f} % of the GPUs generate; {100 * least:.0f} to {100 * most:.0f} % is "
        "where runs are usually stable",
        (f"actors.replicas: {direction} (pipelinerl plan --job)",),
        {"share": share, "least": least, "most": most},
    )


def large_planned_lag(facts: JobFacts) -> Finding | None:
    lag = facts.planned_lag
    return judge(
        PLANNED_LAG,
        lag,
        f"a sequence may be up to about {lag} steps old when it is trained: {PLANNED_LAG.meaning} "
        f"than {PLANNED_LAG.limit:g}",
        {"planned_lag": lag, "studied_lag": PLANNED_LAG.limit},
    )


def no_checkpoints(facts: JobFacts) -> Finding | None:
    every, steps = facts.spec.trainers.checkpoint.every_steps, facts.spec.algorithm.steps
    if 0 < every < steps:
        return None
    return Finding(
        Severity.ADVICE,
        f"no checkpoint before the end: everySteps={every} of {counted(steps, 'step')}; a crash "
        "loses all of them",
        ("trainers.checkpoint.everySteps: between 1 and algorithm.steps",),
        {"every_steps": every, "steps": steps},
    )


def no_parity_check(facts: JobFacts) -> Finding | None:
    if facts.spec.trainers.parity.num_prompts > 0:
        return None
    return Finding(
        Severity.ADVICE,
        "log-probabilities of generator and trainer are not compared before training: importance "
        "weights may be wrong without notice",
        ("trainers.parity.numPrompts: 4",),
        {"num_prompts": 0},
    )
