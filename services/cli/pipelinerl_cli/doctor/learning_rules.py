"""Rules on what a run learns from."""

from pipelinerl_cli.doctor.finding import Finding, judge
from pipelinerl_common.judgements import (
    CLIPPED,
    COMPLETIONS_LONG,
    ENTROPY_COLLAPSED,
    ESS,
    GRADIENT_NORM,
    LAG,
    NO_ADVANTAGE,
    REWARD_FLAT,
    SOLVED_REWARD,
)
from pipelinerl_common.runs.facts import RunFacts

_FEWEST_STEPS = 20
"""Shorter runs are not judged by a trend."""


def reward_flat(facts: RunFacts) -> Finding | None:
    first, last = facts.first("reward_mean"), facts.last("reward_mean")
    num_steps = len(facts.history.steps)
    if not last < SOLVED_REWARD or num_steps < _FEWEST_STEPS:
        return None
    return judge(
        REWARD_FLAT,
        last - first,
        f"the reward went from {first:.3f} to {last:.3f} in {num_steps} steps: "
        f"{REWARD_FLAT.meaning}",
        {"reward_first": first, "reward_last": last, "steps": num_steps},
    )


def ess_low(facts: RunFacts) -> Finding | None:
    ess = facts.mean("ess")
    return judge(
        ESS,
        ess,
        f"the effective sample size is {ess:.2f}: {ESS.meaning}",
        facts.means("ess", "ess_truncated", "lag_mean"),
    )


def lag_high(facts: RunFacts) -> Finding | None:
    lag = facts.mean("lag_mean")
    message = f"trained tokens are {lag:.1f} steps old on average"
    return judge(LAG, lag, message, facts.means("lag_mean", "lag_max", "ess"))


def groups_without_gradient(facts: RunFacts) -> Finding | None:
    """Groups whose trajectories have equal rewards: a success rate p gives at least p^G + (1-p)^G
    of them, more if prompts differ.
    """
    group_size = facts.job.spec.task.group_size
    success = facts.last("success_mean")
    expected = success**group_size + (1 - success) ** group_size if 0 <= success <= 1 else 0.0
    dropped = float(facts.summary["dropped_groups"].get("zero_advantage", 0))
    trained = facts.total("preprocessor", "groups_trained_total")
    share = max(expected, dropped / (dropped + trained) if dropped + trained else 0.0)
    if not NO_ADVANTAGE.is_beyond(share):
        return None
    too_hard = success < 0.5
    return Finding(
        NO_ADVANTAGE.severity_of(share) if too_hard else NO_ADVANTAGE.severity,
        f"at least {100 * share:.0f} % of the groups have equal rewards and teach nothing: the "
        f"prompts are too {'hard' if too_hard else 'easy'}",
        (
            f"task.args: {'easier' if too_hard else 'harder'} prompts",
            "task.groupSize: higher",
            "algorithm.dropZeroAdvantage: true, so that batches hold only groups that teach",
        ),
        {"share": share, "success_mean": success, "dropped_zero_advantage": dropped},
    )


def completions_cut_off(facts: RunFacts) -> Finding | None:
    limit = facts.job.spec.task.sampling.max_tokens
    length = facts.mean("completion_length_mean")
    return judge(
        COMPLETIONS_LONG,
        length / limit,
        f"completions have {length:.0f} tokens on average of at most {limit}: "
        f"{COMPLETIONS_LONG.meaning}",
        {"completion_length_mean": length, "max_tokens": limit},
    )


def entropy_collapsed(facts: RunFacts) -> Finding | None:
    first, last = facts.first("entropy"), facts.last("entropy")
    reward = facts.last("reward_mean")
    num_steps = len(facts.history.steps)
    if not first > 0 or reward > SOLVED_REWARD or num_steps < _FEWEST_STEPS:
        return None
    return judge(
        ENTROPY_COLLAPSED,
        last / first,
        f"the entropy fell from {first:.3f} to {last:.3f} before the task was learnt: "
        f"{ENTROPY_COLLAPSED.meaning}",
        {"entropy_first": first, "entropy_last": last, "reward_last": reward},
    )


def ratios_clipped(facts: RunFacts) -> Finding | None:
    share, surrogate = facts.mean("clip_fraction"), facts.job.spec.algorithm.surrogate
    bound = "algorithm.truncation" if surrogate == "score" else "algorithm.clipHigh"
    return judge(
        CLIPPED,
        share,
        f"{100 * share:.0f} % of the tokens have a clipped ratio",
        facts.means("clip_fraction", "ess"),
        ("staleness.eta: lower", "algorithm.optimizer.learningRate: lower", f"{bound}: higher"),
    )


def gradients_scaled_down(facts: RunFacts) -> Finding | None:
    norm, limit = facts.mean("grad_norm"), facts.job.spec.algorithm.optimizer.max_grad_norm
    return judge(
        GRADIENT_NORM,
        norm / limit,
        f"the gradient norm is {norm:.2f}, {norm / limit:.0f} times maxGradNorm: "
        f"{GRADIENT_NORM.meaning}",
        {"grad_norm": norm, "max_grad_norm": limit},
    )
