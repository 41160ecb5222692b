"""Rules on where a run's time goes."""

from math import isnan
from statistics import fmean, pstdev

from pipelinerl_cli.doctor.facts import FEWEST_POINTS, RunFacts, mean
from pipelinerl_cli.doctor.finding import Finding, Severity
from pipelinerl_cli.doctor.job_rules import LEAST_BATCH_PER_GPU
from pipelinerl_common.text import counted

STARVED_WAIT = 0.2
"""The trainer waits for more than this share of its time."""
BUSY_WAIT = 0.1
"""Below this share it does not wait."""
IDLE_FILL = 0.6
"""Generators are idle when less than this share of their places is taken."""
DEEP_QUEUE = 1.5
"""Batches of finished groups that wait."""
LONG_PAUSE = 0.05
"""Share of the step's time that decoding stands still for new weights."""
UNEVEN = 0.2
"""How far below the mean an actor may be; users advise 15 to 20 %."""
FULL_KV = 0.7
"""Share of the KV blocks beyond which more sequences at once would soon preempt one another."""
OVERFULL_KV = 0.92
MANY_PREEMPTIONS = 0.1
"""Of one trajectory. Rare ones cost little."""
SWING = 0.5
"""Standard deviation of the running requests over their mean."""


def admission_starves_generators(facts: RunFacts) -> Finding | None:
    if not (
        facts.wait_share > STARVED_WAIT and facts.fill < IDLE_FILL and _admission_is_tight(facts)
    ):
        return None
    return Finding(
        Severity.WARNING,
        f"the trainer waits {_percent(facts.wait_share)} of its time while "
        f"{_percent(1 - facts.fill)} of the generators' "
        "places are empty: the staleness policy lets only "
        f"{counted(facts.job.max_admitted, 'sequence')} be outstanding",
        ("staleness.eta: higher", "algorithm.groupsPerStep: higher"),
        {
            "wait_share": facts.wait_share,
            "fill": facts.fill,
            "max_admitted": facts.job.max_admitted,
        },
    )


def environment_starves_generators(facts: RunFacts) -> Finding | None:
    if not (
        facts.wait_share > STARVED_WAIT
        and facts.fill < IDLE_FILL
        and not _admission_is_tight(facts)
    ):
        return None
    return Finding(
        Severity.WARNING,
        f"the trainer waits {_percent(facts.wait_share)} of its time while "
        f"{_percent(1 - facts.fill)} of the generators' "
        "places are empty, though the staleness policy allows more: trajectories spend their time "
        "outside the generator",
        (
            "the task: a faster verifier or environment",
            "actors.replicas: more",
            "task.verifierTimeoutSeconds: lower",
        ),
        {"wait_share": facts.wait_share, "fill": facts.fill},
    )


def generation_is_slow(facts: RunFacts) -> Finding | None:
    if not (facts.wait_share > STARVED_WAIT and facts.fill >= IDLE_FILL):
        return None
    return Finding(
        Severity.WARNING,
        f"the trainer waits {_percent(facts.wait_share)} of its time, the generators are "
        f"{_percent(facts.fill)} full: "
        "generation is the bottleneck" + _kv_room(facts),
        (
            _more("actors", "two", "trainers", facts),
            *(() if facts.kv_usage > FULL_KV else ("actors.generator.maxRunningRequests: higher",)),
        ),
        {
            "wait_share": facts.wait_share,
            "fill": facts.fill,
            "train_seconds": facts.mean("train_seconds"),
            **({} if isnan(facts.kv_usage) else {"kv_usage": facts.kv_usage}),
        },
    )


def kv_cache_full(facts: RunFacts) -> Finding | None:
    preemptions = facts.preemptions_per_trajectory
    if not (preemptions > MANY_PREEMPTIONS or facts.kv_usage > OVERFULL_KV):
        return None
    generator = facts.job.spec.actors.generator
    return Finding(
        Severity.WARNING,
        f"the fullest generator uses {_percent(facts.kv_usage)} of its KV cache, and a trajectory "
        "is preempted "
        f"{preemptions:.1f} times on average: each time all of it is computed again",
        (
            f"actors.generator.maxRunningRequests: lower than {generator.max_running_requests}",
            "actors.generator.kvCacheBytes: higher where memory allows",
            "staleness.policy: slack or prime_rl, which admit by the KV use",
        ),
        {"kv_usage": facts.kv_usage, "preemptions_per_trajectory": preemptions},
    )


def training_is_slow(facts: RunFacts) -> Finding | None:
    if not (facts.wait_share < BUSY_WAIT and facts.fill < IDLE_FILL):
        return None
    return Finding(
        Severity.WARNING,
        f"the trainer never waits ({_percent(facts.wait_share)} of its time) and "
        f"{_percent(1 - facts.fill)} of the generators' "
        "places are empty: training is the bottleneck",
        (
            _more("trainers", "five", "actors", facts),
            "trainers.microBatchTokens: higher",
            "trainers.activationCheckpointing: false where memory allows",
        ),
        {
            "wait_share": facts.wait_share,
            "fill": facts.fill,
            "train_seconds": facts.mean("train_seconds"),
        },
    )


def queue_too_deep(facts: RunFacts) -> Finding | None:
    ready = facts.gauge_mean("preprocessor", "queue_groups{stage=ready}")
    batches = ready / facts.job.spec.algorithm.groups_per_step
    if not batches > DEEP_QUEUE:
        return None
    return Finding(
        Severity.WARNING,
        f"{ready:.0f} finished groups wait on average, {batches:.1f} batches: every one of them "
        "adds a step of lag for nothing",
        ("staleness.eta: lower", "actors.replicas: fewer", "trainers.replicas: more"),
        {"groups_ready": ready, "batches": batches, "lag_mean": facts.mean("lag_mean")},
    )


def updates_slower_than_steps(facts: RunFacts) -> Finding | None:
    share = facts.step_share("publish_seconds")
    if not share > 1:
        return None
    return Finding(
        Severity.WARNING,
        f"a weight update takes {facts.mean('publish_seconds'):.2f} s, a step "
        f"{facts.mean('step_seconds'):.2f} s: "
        "versions are skipped and the lag grows",
        (
            *(
                ("weightTransfer.backend: nccl between GPUs",)
                if facts.job.num_generating > 0
                else ()
            ),
            "weightTransfer.bucketBytes: higher",
            "weightTransfer.mode: staged",
        ),
        {
            "publish_seconds": facts.mean("publish_seconds"),
            "step_seconds": facts.mean("step_seconds"),
            "transfer_seconds": facts.mean("transfer_seconds"),
        },
    )


def updates_pause_decoding(facts: RunFacts) -> Finding | None:
    pause = facts.summary["pause_seconds_mean"]
    whole = mean(step.get("step_seconds") for step in facts.history.steps)
    if pause is None or not (whole > 0 and pause / whole > LONG_PAUSE):
        return None
    transfer = facts.job.spec.weight_transfer
    remedies = (
        ("weightTransfer.mode: staged", transfer.mode == "inplace"),
        ("weightTransfer.kvCache: keep", transfer.kv_cache == "recompute"),
        (
            "weightTransfer.backend: nccl between GPUs",
            transfer.backend == "gloo" and facts.job.num_generating > 0,
        ),
        ("algorithm.groupsPerStep: higher, for fewer updates", True),
    )
    return Finding(
        Severity.WARNING,
        f"decoding stands still for {pause:.3f} s mean in each step, {_percent(pause / whole)} of "
        "its time",
        tuple(remedy for remedy, applies in remedies if applies),
        {"pause_seconds_mean": pause, "share": pause / whole},
    )


def generators_run_small_batches(facts: RunFacts) -> Finding | None:
    if facts.job.num_generating == 0:
        return None
    running = facts.gauge_mean("actor", "requests_running") / facts.job.num_generating
    if not running < LEAST_BATCH_PER_GPU:
        return None
    return Finding(
        Severity.ADVICE,
        f"a generating GPU decodes {counted(running, 'sequence')} at once on average; below "
        f"{LEAST_BATCH_PER_GPU} it waits "
        "for memory",
        (
            "actors.replicas: fewer, with more sequences each (pipelinerl plan)",
            "staleness.eta: higher",
        ),
        {"batch_per_gpu": running, "least": LEAST_BATCH_PER_GPU},
    )


def actors_uneven(facts: RunFacts) -> Finding | None:
    tokens = facts.by_instance("actor", "tokens_generated_total")
    if len(tokens) < 2 or not sum(tokens.values()):
        return None
    slowest = min(tokens, key=lambda instance: tokens[instance])
    behind = 1 - tokens[slowest] / fmean(tokens.values())
    if behind <= UNEVEN:
        return None
    hardware = "GPU" if facts.job.num_generating > 0 else "CPU"
    return Finding(
        Severity.WARNING,
        f"{slowest} generates {_percent(behind)} less than the mean of {len(tokens)} actors",
        (
            f"the node of {slowest}: look for other load or throttling",
            f"actors: the same {hardware} for all replicas",
        ),
        {"behind": behind, "tokens": tokens[slowest]},
    )


def load_swings(facts: RunFacts) -> Finding | None:
    running = facts.gauge("actor", "requests_running")
    if (
        len(running) < 2 * FEWEST_POINTS
        or not fmean(running)
        or pstdev(running) / fmean(running) <= SWING
    ):
        return None
    return Finding(
        Severity.ADVICE,
        f"the number of running requests swings between {min(running):.0f} and {max(running):.0f} "
        f"around {fmean(running):.0f}: generators are filled in bursts",
        (
            "staleness.eta: higher",
            "staleness.policy: one that admits group by group, such as slack",
        ),
        {"deviation": pstdev(running) / fmean(running), "mean": fmean(running)},
    )


def packing_loose(facts: RunFacts) -> Finding | None:
    fill = facts.mean("packing_fill")
    if not fill < 0.8:
        return None
    return Finding(
        Severity.ADVICE,
        f"only {_percent(fill)} of the micro-batches' slots hold tokens",
        (
            "trainers.microBatchTokens: a larger multiple of the usual length",
            "algorithm.groupsPerStep: higher",
        ),
        {"packing_fill": fill},
    )


def packing_uneven(facts: RunFacts) -> Finding | None:
    imbalance = facts.mean("packing_imbalance")
    if not imbalance > 0.1:
        return None
    return Finding(
        Severity.WARNING,
        f"the emptiest rank has {_percent(imbalance)} fewer tokens than the fullest and waits for "
        "it in every step",
        (
            "algorithm.groupsPerStep: higher",
            "trainers.microBatchTokens: lower",
            "trainers.replicas: fewer",
        ),
        {"packing_imbalance": imbalance},
    )


def _admission_is_tight(facts: RunFacts) -> bool:
    """Whether places stay empty because a batch is being trained while the policy allows little
    more than it.
    """
    return facts.job.max_admitted < facts.job.num_places + facts.job.batch_size


def _more(role: str, at_a_time: str, others: str, facts: RunFacts) -> str:
    """The remedy of more processes, taken from the other side; on CPUs `pipelinerl plan` has no
    say.
    """
    if facts.job.num_generating > 0:
        return (
            f"{role}.replicas: more, {at_a_time} GPUs at a time from the {others} (pipelinerl plan)"
        )
    return f"{role}.replicas: more, where cores are free or the {others} can spare some"


def _kv_room(facts: RunFacts) -> str:
    return (
        "" if isnan(facts.kv_usage) else f", with {_percent(facts.kv_usage)} of the KV cache in use"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
