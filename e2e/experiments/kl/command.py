"""Trains the checkpoints, studies them, and writes the results."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from experiments.kl.engines import ENGINES, Schedule
from experiments.kl.plots import write_plots
from experiments.kl.policy_sequence import PolicySequence, Recipe, make_prompts, train
from experiments.kl.study import Result, study

PROMPTS_SEED = 1_000_003
"""Added to the study's seed, for prompts that training has not seen."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The arguments of the command line."""

    engine: str
    starts: Sequence[int]
    schedule: Schedule
    num_sequences: int
    seed: int
    json: Path | None = None
    plot: Path | None = None


def run(flags: Flags) -> list[Result]:
    """Trains as far as the last start needs, and studies every start."""
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="kl-study-") as folder:
        recipe = Recipe(
            flags.schedule.num_tokens, max(flags.starts) + flags.schedule.max_lag, flags.seed
        )
        policies = _train(recipe, Path(folder))
        results = asyncio.run(study_all(flags, policies))
    if flags.json is not None:
        rows = [row for result in results for row in result.rows()]
        flags.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if flags.plot is not None:
        write_plots(flags.plot, results)
    return results


async def study_all(flags: Flags, policies: PolicySequence) -> list[Result]:
    """Studies every start, with the same prompts and seeds."""
    prompts_NP = make_prompts(
        flags.num_sequences, torch.Generator().manual_seed(PROMPTS_SEED + flags.seed)
    )
    studied = ENGINES[flags.engine](policies, flags.num_sequences + flags.schedule.max_lag)
    async with studied.running():
        return [
            await study(studied, flags.schedule, start, prompts_NP, _say) for start in flags.starts
        ]


def _train(recipe: Recipe, folder: Path) -> PolicySequence:
    for policies in train(recipe, folder):
        step = len(policies.rewards)
        if step == 0:
            _say("base model trained")
        elif step % 10 == 0 or step == recipe.num_steps:
            _say(f"step={step} of {recipe.num_steps} reward={policies.rewards[-1]:.3f}")
    return policies


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201
