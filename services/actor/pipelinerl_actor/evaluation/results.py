"""`evaluations/step-40.json`: what one evaluation found. A step that has such a file is not
evaluated again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_common.files import write_whole

if TYPE_CHECKING:
    from pipelinerl_actor.evaluation.evaluate import Evaluation

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Result:
    """Of one step. Example: Result(40, {"held-out": Evaluation(...)}, {"hard": "TimeoutError:
    ..."}, 12.5, (20,)).
    """

    step: int
    sets: Mapping[str, "Evaluation"] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why the other sets have no result."""
    seconds: float = 0.0
    overtaken: tuple[int, ...] = ()
    """Steps that were due before and were not evaluated."""

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "sets": {name: asdict(each) for name, each in self.sets.items()},
            "failed": dict(self.failed),
            "overtaken": list(self.overtaken),
        }

    def __str__(self) -> str:
        """Example: "step 40: held-out pass@1 0.812 (0.766 to 0.853), reward 0.812; hard failed:
        ...".
        """
        parts = [f"{name} {_numbers(each)}" for name, each in self.sets.items()]
        parts += [f"{name} failed: {why}" for name, why in self.failed.items()]
        return f"step {self.step}: {'; '.join(parts)}"


def _numbers(evaluation: "Evaluation") -> str:
    passes = [
        f"pass@{k} {each.mean:.3f} ({each.low:.3f} to {each.high:.3f})"
        for k, each in evaluation.pass_at.items()
    ]
    return ", ".join([*passes, f"reward {evaluation.reward.mean:.3f}"])


def results_folder(root: Path) -> Path:
    """Of the run in `root`."""
    return root / "evaluations"


def result_file(root: Path, step: int) -> Path:
    return results_folder(root) / f"step-{step}.json"


def evaluated_steps(root: Path) -> list[int]:
    """Steps of the run in `root` that have a result, ascending."""
    names = [path.stem.removeprefix("step-") for path in results_folder(root).glob("step-*.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_result(root: Path, result: Result) -> None:
    """Whole or not at all, and durable. Raises OSError."""
    target = result_file(root, result.step)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(result.document(), indent=2) + "\n")
