"""The gradient of a step by the plainest means, to compare the trainer's with."""

from collections.abc import Sequence

import torch
from trainer_fakes import MAX_TOKENS, Trajectory, tiny_policy

from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_trainer.model import PolicyModel


def reference_gradient(
    settings: AlgorithmSettings, members: Sequence[Trajectory], policy: PolicyModel | None = None
) -> dict[str, torch.Tensor]:
    """The gradient of the step's loss by the plainest means: no packing, no DeepSpeed, one sequence
    at a time.
    """
    policy = policy or tiny_policy(settings)
    policy.language_model.set_attn_implementation("eager")
    total = torch.zeros(())
    for member in members:
        length_weight = 1 / member.num_sampled if settings.normalize_by == "sequence_means" else 1
        total = total + length_weight * _plain_loss(settings, policy, member)
    num_tokens = sum(member.num_sampled for member in members)
    divisors = {"tokens": num_tokens, "max_tokens": MAX_TOKENS * len(members)}
    total = total / divisors.get(settings.normalize_by, len(members))
    names, parameters = zip(*policy.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def _plain_loss(
    settings: AlgorithmSettings, policy: PolicyModel, member: Trajectory
) -> torch.Tensor:
    ids = torch.tensor([member.tokens])
    hidden = policy.language_model.get_decoder()(input_ids=ids).last_hidden_state[
        0, member.num_prompt - 1 : -1
    ]
    logits = policy.language_model.get_output_embeddings()(hidden).float() / 0.7
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(-1, ids[0, member.num_prompt :, None])[:, 0]
    advantages, returns = torch.tensor(member.advantages), torch.tensor(member.returns)
    loss: torch.Tensor = torch.zeros(())
    if policy.value_head is not None:
        values = policy.value_head(hidden)[:, 0]
        loss = loss + settings.value_coefficient * 0.5 * ((values - returns) ** 2).sum()
        advantages = _plain_advantages(settings, returns.tolist(), values.tolist())
    loss = loss + _plain_policy_loss(
        settings, logprobs, torch.tensor(member.old_logprobs), advantages
    )
    if settings.kl.placement == "loss":
        r = torch.tensor(member.ref_logprobs) - logprobs
        loss = (
            loss
            + settings.kl.coefficient
            * {"k2": r * r / 2, "k3": torch.exp(r) - r - 1}[settings.kl.estimator].sum()
        )
    negative_entropy: torch.Tensor = (distribution.exp() * distribution).sum()
    return loss + settings.entropy_coefficient * negative_entropy


def _plain_policy_loss(
    settings: AlgorithmSettings, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    log_ratios = logprobs - old
    if settings.surrogate == "clip":
        # GSPO's is one term a sequence; the sum over tokens counts it once for each.
        ratios = torch.exp(
            log_ratios
            if settings.importance == "token"
            else log_ratios.mean().expand(len(log_ratios))
        )
        clipped = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        return -torch.minimum(ratios * advantages, clipped * advantages).sum()
    logs = {
        "token": log_ratios,
        "sequence": log_ratios.sum(),
        "geometric": log_ratios.mean(),
        "none": torch.zeros(()),
    }
    loss = torch.zeros(())
    for t, weight in enumerate(
        torch.exp(logs[settings.importance]).expand(len(log_ratios)).tolist()
    ):
        low, high = settings.truncation_low, settings.truncation or float("inf")
        if not low <= weight <= high:
            weight = 0.0 if settings.outside == "mask" else min(max(weight, low), high)
        if mixing := settings.experimental.gradient_mixing:
            weight = (1 + mixing * weight) / (1 + mixing)
        loss = loss - weight * advantages[t] * logprobs[t]
    return loss


def _plain_advantages(
    settings: AlgorithmSettings, returns: list[float], values: list[float]
) -> torch.Tensor:
    """GAE from its definition: a sum of one-step errors, each from the reward."""
    discount, decay = settings.discount, settings.discount * settings.gae_lambda
    following = [*values[1:], 0.0]
    rewards = [
        now - discount * later for now, later in zip(returns, [*returns[1:], 0.0], strict=True)
    ]
    deltas = [
        r + discount * after - v for r, after, v in zip(rewards, following, values, strict=True)
    ]
    return torch.tensor(
        [sum(decay**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))],
        dtype=torch.float32,
    )
