"""Measures whether any compensation of lag helps: a small policy learns from samples that are late
by a known number of steps.

    python e2e/experiments/lag_compensation.py [--seeds 10] [--json FILE]

The policy is a network over pairs of tokens; a completion has LENGTH tokens, and its reward is the
share of them that follow a secret permutation. Lag is as in flight: in every batch token t was
sampled by the weights of lag * (1 - t / (LENGTH - 1)) steps ago, so first tokens are the stalest.
Losses and optimizer are the trainer's own. Everything is deterministic for a seed.
"""

import argparse
import json
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pipelinerl_common.settings import AlgorithmSettings
from pipelinerl_trainer.objective import Objective
from pipelinerl_trainer.optimizer import LAG, make_optimizer
from pipelinerl_trainer.packed import TokenColumns
from pipelinerl_trainer.scoring import TokenScores

VOCABULARY, LENGTH, HIDDEN = 12, 8, 24
GROUPS, GROUP_SIZE = 8, 8
STEPS = 200
GOAL = 0.8
LAGS = (0, 32)
RATES = (0.004, 0.012)

Options = dict[str, object]
VARIANTS: dict[str, Options] = {
    "no correction": {"importance": "none"},
    "truncated importance weights (c = 5)": {},
    "mixed 1 : 0.3": {"experimental": {"gradientMixing": 0.3}},
    "mixed 1 : 3": {"experimental": {"gradientMixing": 3.0}},
    "delay-compensated Adam 0.5, no weights": {
        "importance": "none",
        "experimental": {"delayCompensation": 0.5},
    },
    "delay-compensated Adam 0.5, weights": {"experimental": {"delayCompensation": 0.5}},
    "delay-compensated Adam 5, weights": {"experimental": {"delayCompensation": 5.0}},
}
ON_POLICY: dict[str, Options] = {"any: every weight is 1": {}}


@dataclass(frozen=True)
class Run:
    """The result of one variant on one seed."""

    steps_to_goal: int | None
    final_reward: float
    """Mean of the exact expected reward over the last tenth of the steps."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.outer = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.log_softmax(self.outer(torch.tanh(self.inner(self.embedding(tokens)))), -1)


def table(network: Network) -> Tensor:
    """Log-probability of each token after each other: [VOCABULARY, VOCABULARY]."""
    with torch.no_grad():
        logprobs: Tensor = network(torch.arange(VOCABULARY))
    return logprobs


def sample(tables: list[Tensor], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Completions [B, LENGTH + 1] after a given token, and log-probs [B, LENGTH]; `tables` go from
    stalest to newest.
    """
    tokens = [torch.randint(VOCABULARY, (GROUPS * GROUP_SIZE,), generator=random)]
    logprobs = []
    for t in range(LENGTH):
        behaviour = tables[round(t / (LENGTH - 1) * (len(tables) - 1))]
        rows = behaviour[tokens[-1]]
        chosen = torch.multinomial(rows.exp(), 1, generator=random)[:, 0]
        logprobs.append(rows.gather(1, chosen[:, None])[:, 0])
        tokens.append(chosen)
    return torch.stack(tokens, 1), torch.stack(logprobs, 1)


def expected_reward(logprobs: Tensor, follows: Tensor) -> float:
    """The exact expected reward, from the distribution over tokens at each position."""
    transition = logprobs.double().exp()
    right = transition[torch.arange(VOCABULARY), follows]
    place = torch.full((VOCABULARY,), 1 / VOCABULARY, dtype=torch.float64)
    total = 0.0
    for _ in range(LENGTH):
        total += float(place @ right)
        place = place @ transition
    return total / LENGTH


def train(variant: Options, lag: int, rate: float, seed: int, steps: int = STEPS) -> Run:
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    network = Network()
    follows = torch.randperm(VOCABULARY, generator=random)
    settings = AlgorithmSettings.model_validate({**variant, "optimizer": {"learningRate": rate}})
    objective = Objective(settings, max_tokens=LENGTH)
    optimizer = make_optimizer(
        network.parameters(), settings.optimizer, settings.experimental.delay_compensation
    )
    versions = deque([table(network)], maxlen=lag + 1)
    rewards: list[float] = []
    for _ in range(steps):
        tokens, old_logprobs = sample(list(versions), random)
        loss = row_loss(objective, network, tokens, old_logprobs, follows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), settings.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group[LAG] = (len(versions) - 1) / 2
        optimizer.step()
        versions.append(table(network))
        rewards.append(expected_reward(versions[-1], follows))
    reached = next((step for step, reward in enumerate(rewards, 1) if reward >= GOAL), None)
    return Run(reached, statistics.fmean(rewards[-steps // 10 :]))


def row_loss(
    objective: Objective, network: Network, tokens: Tensor, old_logprobs: Tensor, follows: Tensor
) -> Tensor:
    """The trainer's loss of the batch, which is one packed row."""
    logprobs = network(tokens[:, :-1]).gather(2, tokens[:, 1:, None])[:, :, 0]
    rewards = (tokens[:, 1:] == follows[tokens[:, :-1]]).float().mean(1).view(GROUPS, GROUP_SIZE)
    centred = (rewards - rewards.mean(1, keepdim=True)) * GROUP_SIZE / (GROUP_SIZE - 1)
    sequences = torch.arange(len(tokens)).repeat_interleave(LENGTH)
    columns = TokenColumns(
        old_logprobs_T=old_logprobs.flatten(),
        advantages_T=centred.flatten().repeat_interleave(LENGTH),
        ref_logprobs_T=None,
        returns_T=None,
        weights_T=torch.ones(tokens.shape[0] * LENGTH),
        sequence_T=sequences,
    )
    scores = TokenScores(logprobs.flatten(), torch.zeros(logprobs.numel()), None)
    return objective(scores, columns).total / len(tokens)


def measure(seeds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for lag in LAGS:
        for rate in RATES:
            for name, variant in (VARIANTS if lag else ON_POLICY).items():
                runs = [train(variant, lag, rate, seed) for seed in range(seeds)]
                rows.append(
                    {
                        "lag": lag,
                        "learning_rate": rate,
                        "variant": name,
                        "reached": sum(run.steps_to_goal is not None for run in runs),
                        "steps_to_goal": statistics.fmean(
                            run.steps_to_goal or STEPS for run in runs
                        ),
                        "steps_to_goal_std": statistics.stdev(
                            run.steps_to_goal or STEPS for run in runs
                        ),
                        "final_reward": statistics.fmean(run.final_reward for run in runs),
                        "final_reward_std": statistics.stdev(run.final_reward for run in runs),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures compensations of lag on a small policy.")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each variant, at least 2")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(max(2, flags.seeds))
    if flags.json is not None:
        flags.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
