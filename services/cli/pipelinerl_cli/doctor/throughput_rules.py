"""Rules on where a run's time goes."""

from math import isnan
from statistics import fmean, pstdev

from pipelinerl_cli.doctor.finding import Finding, judge
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
from pipelinerl_common.runs.facts import FEWEST_POINTS, RunFacts, mean
from pipelinerl_common.text import counted


def admission_starves_generators(facts: RunFacts) -> Finding | None:
    if not (_idle(facts) and _admission_is_tight(facts)):
        return None
    return judge(
        TRAINER_STARVED,
        facts.wait_share,
        f"{_waits_for_places(facts)}: the staleness policy lets only "
        f"{counted(facts.job.max_admitted, 'sequence')} be outstanding",
        {**_shares(facts), "max_admitted": facts.job.max_admitted},
        ("staleness.eta: higher", "algorithm.groupsPerStep: higher"),
    )


def environment_starves_generators(facts: RunFacts) -> Finding | None:
    if not _idle(facts) or _admission_is_tight(facts):
        return None
    return judge(
        TRAINER_STARVED,
        facts.wait_share,
        f"{_waits_for_places(facts)}, though the staleness policy allows more: trajectories spend "
        "their time outside the generator",
        _shares(facts),
        (
            "the task: a faster verifier or environment",
            "actors.replicas: more",
            "task.verifierTimeoutSeconds: lower",
        ),
    )


def generation_is_slow(facts: RunFacts) -> Finding | None:
    if not facts.fill >= GENERATORS_IDLE.limit:
        return None
    kv_usage = facts.kv_usage
    turn, numbers = [_more("actors", "two", "trainers", facts)], _shares(facts)
    if not KV_CACHE_TIGHT.is_beyond(kv_usage):
        turn.append("actors.generator.maxRunningRequests: higher")
    numbers |= facts.means("train_seconds")
    kv_cache = ""
    if not isnan(kv_usage):
        kv_cache = f", with {_percent(kv_usage)} of the KV cache in use"
        numbers["kv_usage"] = kv_usage
    return judge(
        TRAINER_STARVED,
        facts.wait_share,
        f"the trainer waits {_percent(facts.wait_share)} of its time, the generators are "
        f"{_percent(facts.fill)} full: generation is the bottleneck{kv_cache}",
        numbers,
        turn,
    )


def training_is_slow(facts: RunFacts) -> Finding | None:
    if not _idle(facts):
        return None
    return judge(
        TRAINER_BUSY,
        facts.wait_share,
        f"the trainer never waits ({_percent(facts.wait_share)} of its time) and "
        f"{_percent(1 - facts.fill)} of the generators' places are empty: training is the "
        "bottleneck",
        {**_shares(facts), **facts.means("train_seconds")},
        (
            _more("trainers", "five", "actors", facts),
            "trainers.microBatchTokens: higher",
            "trainers.activationCheckpointing: false where memory allows",
        ),
    )


def kv_cache_full(facts: RunFacts) -> Finding | None:
    preemptions = facts.preemptions_per_trajectory
    if not (PREEMPTIONS.is_beyond(preemptions) or KV_CACHE_FULL.is_beyond(facts.kv_usage)):
        return None
    most = facts.job.spec.actors.generator.max_running_requests
    return Finding(
        KV_CACHE_FULL.severity,
        f"the fullest generator uses {_percent(facts.kv_usage)} of its KV cache, and a trajectory "
        f"is preempted {preemptions:.1f} times on average: {PREEMPTIONS.meaning}",
        (
            f"actors.generator.maxRunningRequests: lower than {most}",
            "actors.generator.kvCacheBytes: higher where memory allows",
            "staleness.policy: slack or prime_rl, which admit by the KV use",
        ),
        {"kv_usage": facts.kv_usage, "preemptions_per_trajectory": preemptions},
    )


def queue_too_deep(facts: RunFacts) -> Finding | None:
    ready = facts.gauge_mean("preprocessor", "queue_groups{stage=ready}")
    batches = ready / facts.job.spec.algorithm.groups_per_step
    return judge(
        QUEUE_DEPTH,
        batches,
        f"{ready:.0f} finished groups wait on average, {batches:.1f} batches: "
        f"{QUEUE_DEPTH.meaning}",
        {"groups_ready": ready, "batches": batches, **facts.means("lag_mean")},
    )


def updates_slower_than_steps(facts: RunFacts) -> Finding | None:
    nccl = ["weightTransfer.backend: nccl between GPUs"] if facts.job.num_generating > 0 else []
    return judge(
        UPDATE_STEPS,
        facts.step_share("publish_seconds"),
        f"a weight update takes {facts.mean('publish_seconds'):.2f} s, a step "
        f"{facts.mean('step_seconds'):.2f} s: {UPDATE_STEPS.meaning}",
        facts.means("publish_seconds", "step_seconds", "transfer_seconds"),
        [*nccl, "weightTransfer.bucketBytes: higher", "weightTransfer.mode: staged"],
    )


def updates_pause_decoding(facts: RunFacts) -> Finding | None:
    pause = facts.summary["pause_seconds_mean"]
    whole = mean(step.get("step_seconds") for step in facts.history.steps)
    if pause is None or not whole > 0:
        return None
    transfer, has_gpus = facts.job.spec.weight_transfer, facts.job.num_generating > 0
    remedies = {
        "weightTransfer.mode: staged": transfer.mode == "inplace",
        "weightTransfer.kvCache: keep": transfer.kv_cache == "recompute",
        "weightTransfer.backend: nccl between GPUs": transfer.backend == "gloo" and has_gpus,
        "algorithm.groupsPerStep: higher, for fewer updates": True,
    }
    return judge(
        PAUSE_SHARE,
        pause / whole,
        f"decoding pauses for {pause:.3f} s mean in each step, {_percent(pause / whole)} of its "
        "time",
        {"pause_seconds_mean": pause, "share": pause / whole},
        [remedy for remedy, applies in remedies.items() if applies],
    )


def actors_uneven(facts: RunFacts) -> Finding | None:
    tokens = facts.by_instance("actor", "tokens_generated_total")
    if len(tokens) < 2 or not sum(tokens.values()):
        return None
    slowest = min(tokens, key=lambda instance: tokens[instance])
    behind = 1 - tokens[slowest] / fmean(tokens.values())
    hardware = "GPU" if facts.job.num_generating > 0 else "CPU"
    return judge(
        ACTORS_UNEVEN,
        behind,
        f"{slowest} generates {_percent(behind)} less than the mean of {len(tokens)} actors",
        {"behind": behind, "tokens": tokens[slowest]},
        (
            f"the node of {slowest}: look for other load or throttling",
            f"actors: the same {hardware} for all replicas",
        ),
    )


def packing_uneven(facts: RunFacts) -> Finding | None:
    imbalance = facts.mean("packing_imbalance")
    return judge(
        PACKING_IMBALANCE,
        imbalance,
        f"the emptiest rank has {_percent(imbalance)} fewer tokens than the fullest: "
        f"{PACKING_IMBALANCE.meaning}",
        {"packing_imbalance": imbalance},
    )


def packing_loose(facts: RunFacts) -> Finding | None:
    fill = facts.mean("packing_fill")
    message = f"only {_percent(fill)} of the micro-batches' slots hold tokens"
    return judge(PACKING_FILL, fill, message, {"packing_fill": fill})


def load_swings(facts: RunFacts) -> Finding | None:
    running = facts.gauge("actor", "requests_running")
    if len(running) < 2 * FEWEST_POINTS or not (average := fmean(running)):
        return None
    deviation = pstdev(running) / average
    return judge(
        LOAD_SWINGS,
        deviation,
        f"the number of running requests swings between {min(running):.0f} and {max(running):.0f} "
        f"around {average:.0f}: {LOAD_SWINGS.meaning}",
        {"deviation": deviation, "mean": average},
    )


def generators_run_small_batches(facts: RunFacts) -> Finding | None:
    running = facts.gauge_mean("actor", "requests_running")
    if facts.job.num_generating == 0 or isnan(running):
        return None
    running /= facts.job.num_generating
    return judge(
        SMALL_BATCH,
        running,
        f"a generating GPU decodes {counted(running, 'sequence')} at once on average; below "
        f"{SMALL_BATCH.limit:g} {SMALL_BATCH.meaning}",
        {"batch_per_gpu": running, "least": SMALL_BATCH.limit},
        (
            "actors.replicas: fewer, with more sequences each (pipelinerl plan)",
            "staleness.eta: higher",
        ),
    )


def _idle(facts: RunFacts) -> bool:
    return GENERATORS_IDLE.is_beyond(facts.fill)


def _shares(facts: RunFacts) -> dict[str, float]:
    return {"wait_share": facts.wait_share, "fill": facts.fill}


def _waits_for_places(facts: RunFacts) -> str:
    return (
        f"the trainer waits {_percent(facts.wait_share)} of its time while "
        f"{_percent(1 - facts.fill)} of the generators' places are empty"
    )


def _admission_is_tight(facts: RunFacts) -> bool:
    """Whether places stay empty because a batch is being trained while the policy allows little
    more than it.
    """
    return facts.job.max_admitted < facts.job.num_places + facts.job.batch_size


def _more(role: str, at_a_time: str, others: str, facts: RunFacts) -> str:
    """More processes, taken from the other side; `pipelinerl plan` knows GPUs only."""
    if facts.job.num_generating > 0:
        source = f"{at_a_time} GPUs at a time from the {others} (pipelinerl plan)"
    else:
        source = f"where cores are free or the {others} can spare some"
    return f"{role}.replicas: more, {source}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
