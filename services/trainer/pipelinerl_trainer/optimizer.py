"""The optimizer and its learning rate by step. A new schedule is one line in `SHAPES`.

The optimizer is AdamW, or experimentally one that moves a delayed gradient to the current weights,
whose state has one more float32 tensor per parameter. DeepSpeed gives it flat partitions, on which
it works as on any tensor.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from pipelinerl_common.settings import OptimizerSettings

Shape = Callable[[float], float]
"""Share of the way from the floor (0) to the peak (1), by the progress after warm-up from 0 to 1.
"""

SHAPES: Mapping[str, Shape] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, num_steps: int, settings: OptimizerSettings) -> float:
    """Returns the learning rate of optimizer step `step` (from 0) of `num_steps`.

    Warm-up is linear and its first step is not 0: step s of w warm-up steps has (s + 1) / (w + 1)
    of the peak. After it the shape runs from the peak at the first step to
    `min_learning_rate_ratio` of it at the last.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, num_steps - 1 - warmup)
    floor = settings.min_learning_rate_ratio if settings.schedule != "constant" else 0.0
    share = SHAPES[settings.schedule](min(1.0, progress))
    return settings.learning_rate * (floor + (1.0 - floor) * share)


LAG = "lag"
"""Key of a parameter group: mean lag of the gradient's samples, in steps."""


class DelayCompensatedAdamW(AdamW):
    """AdamW with g + lambda (g * g / (sqrt(v) + eps)) * (w - w_delayed) in the place of the
    gradient g.

    The added term is a first-order expansion of the gradient around the delayed weights, with the
    diagonal g * g in the place of the Hessian and Adam's second moment v as its scale. Source:
    DC-ASGD with an adaptive lambda (arXiv 1609.08326). w - w_delayed is lag times the moving
    average of past updates, so that no old weights are kept: exact for constant updates.

    Experimental. The source's gradients are computed at the delayed weights; a policy gradient is
    computed at the current weights from delayed samples, and importance weights correct most of
    that already.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, compensation: float, **arguments: Any
    ) -> None:
        super().__init__(parameters, **arguments)
        self._compensation = compensation
        for group in self.param_groups:
            group.setdefault(LAG, 0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies one update. `closure` must be None, because the gradient exists already."""
        if closure is not None:
            raise ValueError("DelayCompensatedAdamW takes no closure")
        before: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._compensate(parameter, group)
                    before[parameter] = parameter.detach().clone()
        super().step()
        for group in self.param_groups:
            decay = group["betas"][0]
            for parameter in (each for each in group["params"] if each in before):
                update = parameter.detach() - before[parameter]
                state = self.state[parameter]
                state["update"] = (
                    update * (1 - decay) + state.get("update", torch.zeros_like(update)) * decay
                )
        return None

    def _compensate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state.get(parameter, {})
        if "update" not in state or group[LAG] == 0:
            return
        gradient = parameter.grad
        assert gradient is not None
        drift = group[LAG] * state["update"]
        scale = self._compensation / (state["exp_avg_sq"].sqrt() + group["eps"])
        gradient.add_(scale * gradient * gradient * drift)


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: OptimizerSettings,
    delay_compensation: float = 0.0,
) -> AdamW:
    """Returns the optimizer that the job asks for."""
    trained = list(parameters)
    arguments: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        # The unfused update on a device needs a temporary as large as the rank's float32 weights.
        "fused": all(each.device.type == "cuda" for each in trained) or None,
    }
    if delay_compensation > 0:
        return DelayCompensatedAdamW(trained, compensation=delay_compensation, **arguments)
    return AdamW(trained, **arguments)
