"""Set-ups that can be simulated by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.lengths import ConstructedLengths, Lengths, LognormalLengths
from pipelinerl_staleness.policy import PolicySettings
from pipelinerl_staleness.registry import POLICIES, parse_policy_settings


@dataclass(frozen=True, slots=True)
class SimulationPreset:
    """A set-up: hardware, load, and the policies' parameters that follow from them.

    Example: `article` trains 10 steps of 16 groups of 8 trajectories on 8 GPUs.
    """

    about: str
    cluster: SimulatedCluster
    groups_per_step: int
    group_size: int
    num_steps: int
    lengths: Callable[[int, int, int], Lengths]
    """Returns lengths for a seed, groups per step and group size."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters by policy that follow from the set-up, where the policy's own defaults do not."""

    def policy_settings(self, policy: str, chosen: Mapping[str, Any]) -> PolicySettings:
        """Returns the policy's settings: chosen ones, over the set-up's, over its defaults."""
        given = dict(self.parameters.get(policy, {}))
        if policy in POLICIES and "group_size" in POLICIES[policy].parameter_names():
            given["group_size"] = self.group_size
        return parse_policy_settings(policy, {**given, **chosen})


_ARTICLE_NEMO = {"max_buffered_rollouts": 96, "max_inflight_prompts": 96}
_ARTICLE_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "prime_rl": {"initial_inflight": 25},  # KV tokens of both engines over the longest sequence
    "nemo_windowed": _ARTICLE_NEMO,
    "nemo_weight_fifo": _ARTICLE_NEMO,
    "nemo_ready_first": _ARTICLE_NEMO,
    "nemo_in_order": _ARTICLE_NEMO,
}

PRESETS: Mapping[str, SimulationPreset] = {
    "article": SimulationPreset(
        about="the comparison article: 8B model, 2 generating and 6 training GPUs, 10 steps of 16 "
        "groups of 8",
        cluster=SimulatedCluster(),
        groups_per_step=16,
        group_size=8,
        num_steps=10,
        lengths=lambda seed, _, size: LognormalLengths(seed, size),
        parameters=_ARTICLE_PARAMETERS,
    ),
    "article-constructed": SimulationPreset(
        about="the article's adversarial load: a fast batch, two slow ones, then fast ones; "
        "training and publishing are short",
        cluster=SimulatedCluster(train_tokens_per_s=9000.0, publish_s=4.0),
        groups_per_step=16,
        group_size=8,
        num_steps=12,
        lengths=ConstructedLengths,
        parameters=_ARTICLE_PARAMETERS,
    ),
    "paper-128": SimulationPreset(
        about="the PipelineRL paper's main run: 7B model, 128 GPUs, 48 of them generating 64 "
        "sequences each, 128 groups of 8",
        cluster=SimulatedCluster(
            num_engines=48,
            kv_tokens=900_000,
            max_sequences=64,
            decode_step_s=0.009,
            decode_token_s=2.5e-8,
            prefill_tokens_per_s=40_000.0,
            publish_s=1.0,
            train_tokens_per_s=300_000.0,
            train_step_s=0.3,
        ),
        groups_per_step=128,
        group_size=8,
        num_steps=1000,
        lengths=lambda seed, _, size: LognormalLengths(
            seed, size, median=700.0, group_sigma=0.7, own_sigma=0.5, cap=8192
        ),
    ),
}
