"""The targets of in-flight RL against the best conventional RL, and whether they were met."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.baseline.numbers import Ratio, RunNumbers

LEAST_SPEED_UP, MOST_SAMPLES = 1.5, 1.1
SMALL_G = 4
"""In-flight ESS is compared with that of conventional runs with at most this many steps in a round,
or as many as the best one has if those are more.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """One target of the experiment, as a row of its report."""

    name: str
    wanted: str
    measured: str
    is_met: bool


def shown(ratio: Ratio | None) -> str:
    """Example: "1.62 (1.51 to 1.74, 5 seeds)"."""
    if ratio is None:
        return "no seed in which both come to the goal"
    if ratio.num_pairs == 1:
        return f"{ratio.value:.2f} (one seed)"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}, {ratio.num_pairs} seeds)"


def speed_up(ratio: Ratio | None) -> Target:
    """`ratio` of conventional to in-flight time."""
    return Target(
        "time to the goal, conventional / in-flight",
        f"at least {LEAST_SPEED_UP:g}",
        shown(ratio),
        ratio is not None and ratio.value >= LEAST_SPEED_UP,
    )


def samples(ratio: Ratio | None) -> Target:
    """`ratio` of in-flight to conventional trajectories. Fewer trajectories meet the target too."""
    return Target(
        "trajectories to the goal, in-flight / conventional",
        f"at most {MOST_SAMPLES:g}",
        shown(ratio),
        ratio is not None and ratio.value <= MOST_SAMPLES,
    )


def ess(
    in_flight: Sequence[RunNumbers], conventional: Sequence[tuple[int, RunNumbers]], best: int
) -> Target:
    """`conventional` are runs with their G, `best` is the G of the best. A higher ESS is closer to
    on-policy: the in-flight ESS must not be below the least of theirs.
    """
    small = max(SMALL_G, best)
    mine = [run.ess_mean for run in in_flight if run.ess_mean is not None]
    theirs = [run.ess_mean for g, run in conventional if g <= small and run.ess_mean is not None]
    name = "mean ESS in flight"
    if not mine or not theirs:
        return Target(name, f"that of conventional G up to {small}", "no such runs", False)
    return Target(
        name,
        f"at least {min(theirs):.4f}, the least of conventional G up to {small} (to "
        f"{max(theirs):.4f})",
        f"{fmean(mine):.4f}",
        fmean(mine) >= min(theirs),
    )
