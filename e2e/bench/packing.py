"""`e2e/bench/run packing`: the preprocessor's packing against first fit in arrival order, on the
same heavy-tailed batches.

`fill` is the share of token slots that hold a token when every row is as long as the budget, over
all batches; `baseline_fill` is the same for the baseline. `slot_fill` is the share of the slots
that the trainer really computes, since the product cuts a row to the length in use. Imbalance is
(most - fewest) / most tokens of a rank: ours in the worst batch, the baseline's in the median one.
Samples per minute include the assignment and every column of every micro-batch.

The baseline packs as the reference system does: samples are taken in the order of arrival; the one
open row is closed when the next sample does not fit or when its rank has its share of the step's
samples; rows are assigned to the ranks in turn.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.report import Report, Row, at_least, at_most
from bench.trajectories import Workload
from pipelinerl_common.types import MicroBatch, Sample
from pipelinerl_preprocessor.packing import Assignment, pack
from pipelinerl_preprocessor.rows import TrainSequence, build_row

TITLE = "Packing against first fit in arrival order"
GROUP_SIZE = 8


@dataclass
class Rank:
    """The baseline's rows of one rank: tokens of each row, and the samples in all of them."""

    rows: list[int] = field(default_factory=list)
    num_samples: int = 0


@dataclass(frozen=True)
class Packed:
    """One batch, packed both ways."""

    assignment: Assignment
    seconds: float
    num_samples: int
    baseline: list[Rank]


def bench(args: argparse.Namespace) -> Report:
    """Packs `args.rounds` batches of `args.samples` samples."""
    num_samples, rounds = (args.samples, 2) if args.quick else (args.samples, args.rounds)
    num_groups = -(-num_samples // GROUP_SIZE)
    batches = []
    for number in range(rounds):
        seed = args.seed * 1000 + number
        workload = Workload(
            num_groups, num_groups, GROUP_SIZE, args.median_tokens, args.max_tokens, seed
        )
        batches.append(_pack(workload, args.ranks, args.slots))
    return _report(batches, args.slots)


def _pack(workload: Workload, num_ranks: int, budget: int) -> Packed:
    groups = workload.groups()
    numbered = [
        (number, _sequence(sample))
        for number, group in enumerate(groups)
        for sample in group.samples
    ]
    lengths = [sequence.num_tokens for _, sequence in numbered]
    start = time.perf_counter()
    assignment = pack(lengths, budget, num_ranks)
    built = [_build_rank(assignment, rank, numbered) for rank in range(num_ranks)]
    seconds = time.perf_counter() - start
    assert sum(row.num_trained for rows in built for row in rows) == sum(
        group.num_sampled for group in groups
    )
    return Packed(assignment, seconds, len(numbered), first_fit(lengths, num_ranks, budget))


def _sequence(sample: Sample) -> TrainSequence:
    return TrainSequence(
        token_ids_S=sample.token_ids_S,
        segment_lengths=sample.segment_lengths,
        logprobs_T=sample.logprobs_T,
        ref_logprobs_T=None,
        version_runs=sample.version_runs,
        advantage=sample.reward - 0.5,
        returns_T=None,
        reward=sample.reward,
    )


def _build_rank(
    assignment: Assignment, rank: int, numbered: Sequence[tuple[int, TrainSequence]]
) -> list[MicroBatch]:
    return [
        build_row(
            index,
            [numbered[member] for member in members],
            assignment.num_slots(rank, index),
            temperature=1.0,
            reference=False,
            returns=False,
        )
        for index, members in enumerate(assignment.rows[rank])
    ]


def _report(batches: Sequence[Packed], budget: int) -> Report:
    fill = _share(
        [batch.assignment.budget_fill for batch in batches],
        [_num_rows(batch.assignment) for batch in batches],
    )
    imbalance = max(batch.assignment.imbalance for batch in batches)
    samples_per_minute = 60 * median(batch.num_samples / batch.seconds for batch in batches)
    rows = [row for batch in batches for rank in batch.baseline for row in rank.rows]
    baseline_fill = sum(rows) / (budget * len(rows))
    baseline_imbalance = median(_imbalance(batch.baseline) for batch in batches)
    slot_fill = median(batch.assignment.fill for batch in batches)
    values = {
        "fill": fill,
        "imbalance": imbalance,
        "samples_per_minute": samples_per_minute,
        "baseline_fill": baseline_fill,
        "baseline_imbalance": baseline_imbalance,
        "slot_fill": slot_fill,
        "num_samples": sum(batch.num_samples for batch in batches),
        "rounds": len(batches),
    }
    table = (
        at_least("fill of the budget", fill, 0.97, f"{baseline_fill:.3g}"),
        at_most("imbalance of ranks", imbalance, 0.02, f"{baseline_imbalance:.3g}"),
        at_least("samples per minute", samples_per_minute, 1e6),
        Row("fill of computed slots", f"{slot_fill:.4g}"),
    )
    return Report(TITLE, dict(values), table)


def _num_rows(assignment: Assignment) -> int:
    return len(assignment.rows) * assignment.num_micro_batches


def _share(fills: Sequence[float], weights: Sequence[int]) -> float:
    """Mean of `fills`, each counted by its number of rows."""
    return sum(fill * weight for fill, weight in zip(fills, weights, strict=True)) / sum(weights)


def _imbalance(ranks: Sequence[Rank]) -> float:
    tokens = [sum(rank.rows) for rank in ranks]
    return (max(tokens) - min(tokens)) / max(tokens)


def first_fit(lengths: Sequence[int], num_ranks: int, num_slots: int) -> list[Rank]:
    """Packs samples of `lengths` tokens, each at most `num_slots`, into rows; every rank gets an
    equal share of the samples.
    """
    ranks = [Rank() for _ in range(num_ranks)]
    share = -(-len(lengths) // num_ranks)
    turn, tokens, samples = 0, 0, 0
    for length in lengths:
        if samples and (tokens + length > num_slots or ranks[turn].num_samples + samples == share):
            _close(ranks[turn], tokens, samples)
            turn, tokens, samples = _next_rank(ranks, turn, share), 0, 0
        tokens, samples = tokens + length, samples + 1
    if samples:
        _close(ranks[turn], tokens, samples)
    return ranks


def _close(rank: Rank, tokens: int, samples: int) -> None:
    rank.rows.append(tokens)
    rank.num_samples += samples


def _next_rank(ranks: Sequence[Rank], turn: int, share: int) -> int:
    """The next rank in turn that still lacks samples."""
    order = [(turn + step) % len(ranks) for step in range(1, len(ranks) + 1)]
    return next((number for number in order if ranks[number].num_samples < share), turn)
