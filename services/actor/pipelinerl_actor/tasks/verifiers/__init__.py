"""Any environment of the package `verifiers`: its prompts, its answers to the policy, its rewards.

```
 rollout loop --samples--> turn --as a completion--> environment: stop conditions, tools, env_response
      ^                                                   |
      +------------- the messages that are new -----------+        in the end: its rubric -> Verdict
```
The environment never asks a model for the policy's turns: they are sampled here, and their tokens
are kept as they were.
"""

from typing import Any, Literal

from pipelinerl_actor.dataset.problems import Problems
from pipelinerl_actor.task import Task
from pipelinerl_actor.tasks.verifiers.loading import load
from pipelinerl_actor.tasks.verifiers.tasks import MultiTurn, SingleTurn


def environment(
    *,
    seed: int,
    name: str,
    arguments: dict[str, Any] | None = None,
    split: Literal["train", "eval"] = "train",
) -> Task:
    """The environment that `verifiers` knows as `name`, made with `arguments`; `split` is which of
    its data sets to take.

    Raises SettingsError when it cannot be made, or is of a kind that cannot be played here.
    """
    loaded = load(name, arguments or {}, split, seed)
    order = Problems(range(len(loaded.rows)), None, 0, seed)
    return SingleTurn(loaded, order) if loaded.is_single_turn else MultiTurn(loaded, order)
