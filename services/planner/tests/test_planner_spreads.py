"""What depends on the spread of response lengths, which the article does not state: its lines under
other lognormal spreads than the preset's, and SLACK on lengths, seeds and trainers that its
defaults were not tuned on.

The article's real lengths are not public, and no single lognormal meets all of its lines. Each line
that the preset misses is met, within 5 points of waste or one version, under a spread that is named
here, by the same policy code; and that spread misses other lines. So it is the lengths that differ,
not the rule.

line                          article              preset `article`   here, under which spread
trl waste, eta 0, 1, 5        59.8, 22.2, 14.8 %   69, 38, 20 %       62, 27, 15 % under EVEN
prime_rl waste, eta 1, 2, 3   34.4, 14.4, 1.8 %    29, 7, 1 %         34, 11, 1 % under MIXED
verl_drop waste, eta 1        61.2 %               66 %               57 to 66 % up to EVEN
slime max, f 3, 4, 5          5, 6, 7              4-5, 4-5, 4-5      6, 6, 6 under WIDE
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from pipelinerl_planner.lengths import LognormalLengths
from pipelinerl_planner.outcome import SimulationOutcome
from pipelinerl_planner.presets import PRESETS
from pipelinerl_planner.simulation import SimulationRun, simulate
from pipelinerl_staleness.registry import make_policy

ARTICLE = PRESETS["article"]
SEEDS = (0, 1)
HELD_OUT = (101, 102)
"""Seeds that nothing was tuned on."""


class Spread(NamedTuple):
    """Parameters of LognormalLengths: median in tokens, spread between and within groups."""

    median: float
    group_sigma: float
    own_sigma: float


PRESET = Spread(8500.0, 0.7, 0.3)
EVEN = Spread(10_000.0, 0.3, 0.4)
MIXED = Spread(7500.0, 0.65, 0.45)
WIDE = Spread(7000.0, 0.7, 0.45)
HEAVY = Spread(5600.0, 0.9, 0.58)
SKEWED = Spread(3000.0, 1.1, 0.2)


@cache
def outcomes(
    spread: Spread,
    seeds: tuple[int, ...],
    train_tokens_per_s: float,
    policy: str,
    parameter: str,
    value: Any,
) -> tuple[SimulationOutcome, ...]:
    settings = ARTICLE.policy_settings(policy, {parameter: value})
    cluster = replace(ARTICLE.cluster, train_tokens_per_s=train_tokens_per_s)
    batch = ARTICLE.groups_per_step
    found = []
    for seed in seeds:
        median, group_sigma, own_sigma = spread
        lengths = LognormalLengths(
            seed, ARTICLE.group_size, median=median, group_sigma=group_sigma, own_sigma=own_sigma
        )
        found.append(
            simulate(
                make_policy(settings, batch), SimulationRun(cluster, lengths, ARTICLE.num_steps)
            )
        )
    return tuple(found)


def under(spread: Spread, policy: str, parameter: str, value: Any) -> tuple[SimulationOutcome, ...]:
    return outcomes(spread, SEEDS, ARTICLE.cluster.train_tokens_per_s, policy, parameter, value)


def waste(spread: Spread, policy: str, parameter: str, value: Any) -> float:
    found = under(spread, policy, parameter, value)
    return sum(outcome.waste for outcome in found) / len(found)


def test_the_preset_is_the_spread_that_is_called_so_here() -> None:
    mine = LognormalLengths(
        5, 8, median=PRESET.median, group_sigma=PRESET.group_sigma, own_sigma=PRESET.own_sigma
    )
    assert [mine.group(index) for index in range(300)] == [
        ARTICLE.lengths(5, 16, 8).group(index) for index in range(300)
    ]


@pytest.mark.parametrize(("eta", "article"), [(0, 0.598), (1, 0.222), (5, 0.148)])
def test_trl_wastes_what_the_article_says_where_groups_are_alike(eta: int, article: float) -> None:
    assert waste(EVEN, "trl", "eta", eta) == pytest.approx(article, abs=0.05)


def test_the_spread_that_meets_trl_misses_verl_drop() -> None:
    """The article's maximum at eta=4 is 3, which takes groups that run through three versions; EVEN
    has none.
    """
    assert {outcome.max_staleness for outcome in under(PRESET, "verl_drop", "eta", 4)} == {3}
    assert {outcome.max_staleness for outcome in under(EVEN, "verl_drop", "eta", 4)} == {2}


@pytest.mark.parametrize(("eta", "article"), [(1, 0.344), (2, 0.144), (3, 0.018)])
def test_prime_rl_wastes_what_the_article_says_where_groups_are_more_mixed(
    eta: int, article: float
) -> None:
    """A group is as long as its longest trajectory: the preset's groups are too even inside."""
    assert waste(MIXED, "prime_rl", "eta", eta) == pytest.approx(article, abs=0.05)


def test_verl_drop_at_one_lies_between_two_spreads() -> None:
    assert waste(EVEN, "verl_drop", "eta", 1) < 0.612 < waste(PRESET, "verl_drop", "eta", 1)
    assert waste(EVEN, "verl_drop", "eta", 1) == pytest.approx(0.612, abs=0.05)


@pytest.mark.parametrize(("factor", "article"), [(3, 5), (4, 6), (5, 7)])
def test_slime_reaches_the_article_s_maxima_where_lengths_are_wider(
    factor: int, article: int
) -> None:
    for outcome in under(WIDE, "slime", "prefetch_factor", factor):
        assert abs(outcome.max_staleness - article) <= 1


# SLACK where nothing was tuned

RIVALS = (
    ("nemo_weight_fifo", "eta", 0),
    ("nemo_in_order", "eta", 0),
    ("psrl", "eta", 0),
    ("prime_rl", "eta", 0),
    ("verl_drop", "eta", 1),
)
"""The fastest strict policies, with what is added to eta for their parameter of the same bound."""


def slack_against_the_fastest(
    spread: Spread, train_tokens_per_s: float, eta: int
) -> tuple[float, dict[str, float]]:
    """Mean effective throughput of SLACK and of each rival on held-out seeds."""

    def speed(policy: str, parameter: str, value: int) -> float:
        found = outcomes(spread, HELD_OUT, train_tokens_per_s, policy, parameter, value)
        return sum(outcome.effective_tokens_per_second for outcome in found) / len(found)

    for outcome in outcomes(spread, HELD_OUT, train_tokens_per_s, "slack", "eta", eta):
        assert outcome.waste == 0
        assert outcome.max_staleness <= eta
    return speed("slack", "eta", eta), {
        policy: speed(policy, name, eta + more) for policy, name, more in RIVALS
    }


@pytest.mark.parametrize("eta", [1, 2, 3])
@pytest.mark.parametrize(
    "spread", [PRESET, EVEN, WIDE, HEAVY, SKEWED], ids=["preset", "even", "wide", "heavy", "skewed"]
)
def test_slack_is_strict_wasteless_and_no_slower_than_strict_policies_on_other_lengths(
    spread: Spread, eta: int
) -> None:
    """Within 1 % of the fastest on every one; on HEAVY at eta=2 the two are level."""
    slack, rivals = slack_against_the_fastest(spread, ARTICLE.cluster.train_tokens_per_s, eta)
    assert slack >= 0.99 * max(rivals.values()), rivals


@pytest.mark.parametrize("eta", [1, 2, 3])
@pytest.mark.parametrize(
    "train_tokens_per_s", [2000.0, 9000.0], ids=["slow trainer", "fast trainer"]
)
def test_slack_is_strict_wasteless_and_no_slower_than_strict_policies_with_other_trainers(
    train_tokens_per_s: float, eta: int
) -> None:
    """Within 2 %: with a fast trainer at eta=1, nemo_weight_fifo fills (eta + 1) B and is 1.7 %
    faster than SLACK's 1.5 B. No other knob is better over all of these lengths and trainers.
    """
    slack, rivals = slack_against_the_fastest(PRESET, train_tokens_per_s, eta)
    assert slack >= 0.98 * max(rivals.values()), rivals
