"""The packing that `bench packing` is measured against: arrival order, one open row, no look ahead.

As the reference system does it: samples are taken in the order of arrival; the open row is closed
when the next sample does not fit or when its rank has its share of the step's samples; rows go to
the ranks in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Rank:
    """Tokens of each row that the rank received, and how many samples are in them."""

    rows: list[int] = field(default_factory=list)
    num_samples: int = 0


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
