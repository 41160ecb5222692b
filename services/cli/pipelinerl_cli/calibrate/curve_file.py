"""The file that `pipelinerl plan --utilization` reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_cli.calibrate.measurement import Level
from pipelinerl_common.errors import SettingsError


@dataclass(frozen=True, slots=True)
class CurveScale:
    """What U is a share of."""

    num_gpus: int = 1
    """GPUs of the generator; h and tokens per second in the file are those of one."""
    peak_tokens_per_second: float | None = None
    """Of one GPU: its peak FLOP/s over the FLOPs of one token. None takes the fastest level, the
    plateau.
    """


def curve_document(
    measured: Sequence[Level], scale: CurveScale, about: dict[str, Any]
) -> dict[str, Any]:
    """h and tokens per second per GPU, U at each. Raises SettingsError when the peak is below what
    was measured.
    """
    speeds = [level.tokens_per_second / scale.num_gpus for level in measured]
    peak = max(speeds) if scale.peak_tokens_per_second is None else scale.peak_tokens_per_second
    if max(speeds) > peak:
        raise SettingsError(
            f"--peak-flops and --parameters allow {peak:.1f} tokens/s per GPU, but "
            f"{max(speeds):.1f} were measured: "
            "check both numbers and --gpus"
        )
    return {
        "relative_to": "plateau" if scale.peak_tokens_per_second is None else "peak_flops",
        "peak_tokens_per_second": peak,
        **about,
        "points": [
            {
                "h": level.concurrency / scale.num_gpus,
                "tokens_per_second": speed,
                "utilization": speed / peak,
            }
            for level, speed in zip(measured, speeds, strict=True)
        ],
    }


def write_curve(path: Path, document: dict[str, Any]) -> None:
    """Raises SettingsError when the file cannot be written."""
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {path}: cannot be written: {error.strerror}") from error
