"""Rules on where a run's time goes."""

from math import isnan
from statistics import fmean, pstdev

from pipelinerl_cli.doctor.facts import FEWEST_POINTS, RunFacts, mean
from pipelinerl_cli.doctor.finding import Finding
from pipelinerl_common.judgements import (
    ACTORS_UNEVEN,
    GENERATORS_IDLE,
    KV_CACHE_FULL,
    KV_CACHE_TIGHT,
    LOAD_SWINGS,
    PACKING_FILL,
    PACKING_IMBALANCE,
    PAUSE_SHARE,
    PREEMPTIONS,
    QUEUE_DEPTH,
    SMALL_BATCH,
    TRAINER_BUSY,
    TRAINER_STARVED,
    UPDATE_STEPS,
)
from pipelinerl_common.text import counted


def admission_starves_generators(facts: RunFacts) -> Finding | None:
    if not (_starved(facts) and _idle(facts) and _admission_is_tight(facts)):
        return None
    return Finding(
        TRAINER_STARVED.severity,
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
    if not (_starved(facts) and _idle(facts)) or _admission_is_tight(facts):
        return None
    return Finding(
        TRAINER_STARVED.severity,
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
    if not (_starved(facts) and facts.fill >= GENERATORS_IDLE.limit):
        return None
    return Finding(
        TRAINER_STARVED.severity,
        f"the trainer waits {_percent(facts.wait_share)} of its time, the generators are "
        f"{_percent(facts.fill)} full: "
        "generation is the bottleneck" + _kv_room(facts),
        (
            _more("actors", "two", "trainers", facts),
            *(
                ()
                if KV_CACHE_TIGHT.is_beyond(facts.kv_usage)
                else ("actors.generator.maxRunningRequests: higher",)
            ),
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
    if not (PREEMPTIONS.is_beyond(preemptions) or KV_CACHE_FULL.is_beyond(facts.kv_usage)):
        return None
    generator = facts.job.spec.actors.generator
    return Finding(
        KV_CACHE_FULL.severity,
        f"the fullest generator uses {_percent(facts.kv_usage)} of its KV cache, and a trajectory "
        f"is preempted {preemptions:.1f} times on average: {PREEMPTIONS.meaning}",
        (
            f"actors.generator.maxRunningRequests: lower than {generator.max_running_requests}",
            "actors.generator.kvCacheBytes: higher where memory allows",
            "staleness.policy: slack or prime_rl, which admit by the KV use",
        ),
        {"kv_usage": facts.kv_usage, "preemptions_per_trajectory": preemptions},
    )


def training_is_slow(facts: RunFacts) -> Finding | None:
    if not (TRAINER_BUSY.is_beyond(facts.wait_share) and _idle(facts)):
        return None
    return Finding(
        TRAINER_BUSY.severity,
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
    if not QUEUE_DEPTH.is_beyond(batches):
        return None
    return Finding(
        QUEUE_DEPTH.severity,
        f"{ready:.0f} finished groups wait on average, {batches:.1f} batches: "
        f"{QUEUE_DEPTH.meaning}",
        QUEUE_DEPTH.remedies,
        {"groups_ready": ready, "batches": batches, "lag_mean": facts.mean("lag_mean")},
    )


def updates_slower_than_steps(facts: RunFacts) -> Finding | None:
    if not UPDATE_STEPS.is_beyond(facts.step_share("publish_seconds")):
        return None
    return Finding(
        UPDATE_STEPS.severity,
        f"a weight update takes {facts.mean('publish_seconds'):.2f} s, a step "
        f"{facts.mean('step_seconds'):.2f} s: {UPDATE_STEPS.meaning}",
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
    if pause is None or not (whole > 0 and PAUSE_SHARE.is_beyond(pause / whole)):
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
        PAUSE_SHARE.severity,
        f"decoding stands still for {pause:.3f} s mean in each step, {_percent(pause / whole)} of "
        "its time",
        tuple(remedy for remedy, applies in remedies if applies),
        {"pause_seconds_mean": pause, "share": pause / whole},
    )


def generators_run_small_batches(facts: RunFacts) -> Finding | None:
    if facts.job.num_generating == 0:
        return None
    running = facts.gauge_mean("actor", "requests_running") / facts.job.num_generating
    if not SMALL_BATCH.is_beyond(running):
        return None
    return Finding(
        SMALL_BATCH.severity,
        f"a generating GPU decodes {counted(running, 'sequence')} at once on average; below "
        f"{SMALL_BATCH.limit:g} {SMALL_BATCH.meaning}",
        (
            "actors.replicas: fewer, with more sequences each (pipelinerl plan)",
            "staleness.eta: higher",
        ),
        {"batch_per_gpu": running, "least": SMALL_BATCH.limit},
    )


def actors_uneven(facts: RunFacts) -> Finding | None:
    tokens = facts.by_instance("actor", "tokens_generated_total")
    if len(tokens) < 2 or not sum(tokens.values()):
        return None
    slowest = min(tokens, key=lambda instance: tokens[instance])
    behind = 1 - tokens[slowest] / fmean(tokens.values())
    if not ACTORS_UNEVEN.is_beyond(behind):
        return None
    hardware = "GPU" if facts.job.num_generating > 0 else "CPU"
    return Finding(
        ACTORS_UNEVEN.severity,
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
        or not LOAD_SWINGS.is_beyond(pstdev(running) / fmean(running))
    ):
        return None
    return Finding(
        LOAD_SWINGS.severity,
        f"the number of running requests swings between {min(running):.0f} and {max(running):.0f} "
        f"around {fmean(running):.0f}: {LOAD_SWINGS.meaning}",
        LOAD_SWINGS.remedies,
        {"deviation": pstdev(running) / fmean(running), "mean": fmean(running)},
    )


def packing_loose(facts: RunFacts) -> Finding | None:
    fill = facts.mean("packing_fill")
    if not PACKING_FILL.is_beyond(fill):
        return None
    return Finding(
        PACKING_FILL.severity,
        f"only {_percent(fill)} of the micro-batches' slots hold tokens",
        PACKING_FILL.remedies,
        {"packing_fill": fill},
    )


def packing_uneven(facts: RunFacts) -> Finding | None:
    imbalance = facts.mean("packing_imbalance")
    if not PACKING_IMBALANCE.is_beyond(imbalance):
        return None
    return Finding(
        PACKING_IMBALANCE.severity,
        f"the emptiest rank has {_percent(imbalance)} fewer tokens than the fullest: "
        f"{PACKING_IMBALANCE.meaning}",
        PACKING_IMBALANCE.remedies,
        {"packing_imbalance": imbalance},
    )


def _starved(facts: RunFacts) -> bool:
    return TRAINER_STARVED.is_beyond(facts.wait_share)


def _idle(facts: RunFacts) -> bool:
    return GENERATORS_IDLE.is_beyond(facts.fill)


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
