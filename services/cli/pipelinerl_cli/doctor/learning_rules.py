"""Rules on what a run learns from."""

from pipelinerl_cli.doctor.facts import RunFacts
from pipelinerl_cli.doctor.finding import Finding, Severity

LOW_ESS, USELESS_ESS = 0.8, 0.5
"""Effective sample size, 1 is on-policy."""
HIGH_LAG = 8.0
"""Mean lag in steps."""
LONG_COMPLETION = 0.8
"""Mean completion length over maxTokens; beyond it many are cut off."""
ZERO_ADVANTAGE = 0.5
"""Share of groups without a gradient."""
COLLAPSED_ENTROPY = 0.1
"""Entropy over what it was in the beginning."""
CLIPPED = 0.2
"""Share of tokens whose ratio is clipped or truncated."""
GRADIENT_RATIO = 10.0
"""Gradient norm over maxGradNorm."""
_FEWEST_STEPS = 20
_LEAST_GAIN = 0.02
_GOOD_REWARD = 0.9


def ess_low(facts: RunFacts) -> Finding | None:
    ess = facts.mean("ess")
    if not ess < LOW_ESS:
        return None
    return Finding(
        Severity.CRITICAL if ess < USELESS_ESS else Severity.WARNING,
        f"the effective sample size is {ess:.2f}: of 100 trained tokens {100 * ess:.0f} count, so "
        "far off-policy are they",
        (
            "staleness.eta: lower",
            "algorithm.groupsPerStep: higher",
            "actors.replicas: fewer",
            "algorithm.optimizer.learningRate: lower",
        ),
        {
            "ess": ess,
            "ess_truncated": facts.mean("ess_truncated"),
            "lag_mean": facts.mean("lag_mean"),
        },
    )


def lag_high(facts: RunFacts) -> Finding | None:
    lag = facts.mean("lag_mean")
    if not lag > HIGH_LAG:
        return None
    return Finding(
        Severity.WARNING,
        f"trained tokens are {lag:.1f} steps old on average",
        ("staleness.eta: lower", "algorithm.groupsPerStep: higher", "actors.replicas: fewer"),
        {"lag_mean": lag, "lag_max": facts.mean("lag_max"), "ess": facts.mean("ess")},
    )


def completions_cut_off(facts: RunFacts) -> Finding | None:
    limit = facts.job.spec.task.sampling.max_tokens
    length = facts.mean("completion_length_mean")
    if not length > LONG_COMPLETION * limit:
        return None
    return Finding(
        Severity.WARNING,
        f"completions have {length:.0f} tokens on average of at most {limit}: many are cut off "
        "before their answer",
        (
            "task.sampling.maxTokens: higher, with model.maxModelLen",
            "algorithm.overlong.penaltyBufferTokens: above 0",
            "algorithm.overlong.completions: mask",
        ),
        {"completion_length_mean": length, "max_tokens": limit},
    )


def groups_without_gradient(facts: RunFacts) -> Finding | None:
    """All trajectories of a group alike: a success rate p gives at least p^G + (1-p)^G of them,
    more if prompts differ.
    """
    group_size = facts.job.spec.task.group_size
    success = facts.last("success_mean")
    expected = success**group_size + (1 - success) ** group_size if 0 <= success <= 1 else 0.0
    dropped = float(facts.summary["dropped_groups"].get("zero_advantage", 0))
    trained = facts.total("preprocessor", "groups_trained_total")
    share = max(expected, dropped / (dropped + trained) if dropped + trained else 0.0)
    if share <= ZERO_ADVANTAGE:
        return None
    too_hard = success < 0.5
    return Finding(
        Severity.CRITICAL if share > 0.9 and too_hard else Severity.WARNING,
        f"at least {100 * share:.0f} % of the groups have equal rewards and teach nothing: the "
        "prompts are too "
        f"{'hard' if too_hard else 'easy'}",
        (
            f"task.args: {'easier' if too_hard else 'harder'} prompts",
            "task.groupSize: higher",
            "algorithm.dropZeroAdvantage: true, so that batches hold only groups that teach",
        ),
        {"share": share, "success_mean": success, "dropped_zero_advantage": dropped},
    )


def entropy_collapsed(facts: RunFacts) -> Finding | None:
    first, last = facts.first("entropy"), facts.last("entropy")
    if not (len(facts.history.steps) >= _FEWEST_STEPS and last < COLLAPSED_ENTROPY * first):
        return None
    if facts.last("reward_mean") > _GOOD_REWARD:
        return None
    return Finding(
        Severity.WARNING,
        f"the entropy fell from {first:.3f} to {last:.3f} before the task was learnt: nothing new "
        "is tried any more",
        (
            "algorithm.entropyCoefficient: above 0",
            "algorithm.optimizer.learningRate: lower",
            "algorithm.clipHigh: higher",
        ),
        {"entropy_first": first, "entropy_last": last, "reward_last": facts.last("reward_mean")},
    )


def ratios_clipped(facts: RunFacts) -> Finding | None:
    share = facts.mean("clip_fraction")
    if not share > CLIPPED:
        return None
    limit = (
        "algorithm.truncation"
        if facts.job.spec.algorithm.surrogate == "score"
        else "algorithm.clipHigh"
    )
    return Finding(
        Severity.WARNING,
        f"{100 * share:.0f} % of the tokens have a clipped ratio",
        ("staleness.eta: lower", "algorithm.optimizer.learningRate: lower", f"{limit}: higher"),
        {"clip_fraction": share, "ess": facts.mean("ess")},
    )


def gradients_scaled_down(facts: RunFacts) -> Finding | None:
    norm, limit = facts.mean("grad_norm"), facts.job.spec.algorithm.optimizer.max_grad_norm
    if not norm > GRADIENT_RATIO * limit:
        return None
    return Finding(
        Severity.ADVICE,
        f"the gradient norm is {norm:.2f}, {norm / limit:.0f} times maxGradNorm: every step is "
        "scaled down",
        (
            "algorithm.optimizer.maxGradNorm: higher",
            "algorithm.groupsPerStep: higher",
            "algorithm.optimizer.learningRate: lower",
        ),
        {"grad_norm": norm, "max_grad_norm": limit},
    )


def reward_flat(facts: RunFacts) -> Finding | None:
    first, last = facts.first("reward_mean"), facts.last("reward_mean")
    num_steps = len(facts.history.steps)
    if not (num_steps >= _FEWEST_STEPS and last < first + _LEAST_GAIN and last < _GOOD_REWARD):
        return None
    return Finding(
        Severity.CRITICAL,
        f"the reward went from {first:.3f} to {last:.3f} in {num_steps} steps: the run does not "
        "learn",
        (
            "algorithm.optimizer.learningRate: higher, or lower if the reward fell",
            "task.args: prompts of which some succeed",
            "staleness.eta: lower",
        ),
        {"reward_first": first, "reward_last": last, "steps": num_steps},
    )
