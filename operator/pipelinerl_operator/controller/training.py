"""How training goes, read from the metrics of the job's own processes."""

import asyncio
import re
from dataclasses import dataclass

import aiohttp

from pipelinerl_operator.controller.status import StreamStatus, TrainingStatus

TIMEOUT_S = 5.0
MAX_BYTES = 4 << 20
READ = frozenset(
    {
        "policy_version",
        "lag_mean",
        "ess",
        "reward_mean",
        "samples_trained_total",
        "trainer_phase_seconds_total",
        "stream_messages",
        "queue_groups",
        "queue_oldest_seconds",
        "groups_trained_total",
        "groups_dropped_total",
        "admission_closed_seconds_total",
    }
)
"""Names that are kept of the hundreds that a job tells."""
_LINE = re.compile(rb"^pipelinerl_(\w+)(?:\{([^}]*)\})? ([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?: \d+)?$", re.MULTILINE)
_LABEL = re.compile(rb'(?:^|,)(?:stage|phase|reason)="(\w+)"')


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers by name, those with a stage, phase or reason as "name/stage"; at that moment in monotonic seconds."""

    at: float
    values: dict[str, float]


async def read_metrics(session: aiohttp.ClientSession, address: str) -> Reading | None:
    """`/metrics` at "host:port", or None while it does not answer."""
    try:
        async with session.get(f"http://{address}/metrics", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
            if response.status != 200:
                return None
            text = b""
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > MAX_BYTES:
                    return None
    except (aiohttp.ClientError, OSError):
        return None
    return Reading(asyncio.get_running_loop().time(), parse_metrics(text))


def parse_metrics(text: bytes) -> dict[str, float]:
    """Of Prometheus' text format what the operator reads: {"reward_mean": 0.4, "queue_oldest_seconds/stream": 3.0}."""
    values: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        key = name.decode()
        if key in READ:
            label = _LABEL.search(labels)
            values[f"{key}/{label[1].decode()}" if label else key] = float(value)
    return values


def training_status(now: Reading, before: Reading | None) -> TrainingStatus | None:
    """From the trainer's metrics; None before the first step is counted. The rate is over the time between two readings."""
    values = now.values
    if "policy_version" not in values:
        return None
    rate = None
    if before is not None and now.at > before.at and "samples_trained_total" in before.values:
        trained = values.get("samples_trained_total", 0.0) - before.values["samples_trained_total"]
        rate = round(trained / (now.at - before.at), 2) if trained >= 0 else None
    return TrainingStatus(
        step=max(0, int(values["policy_version"])),
        policy_version=int(values["policy_version"]),
        lag=_rounded(values.get("lag_mean")),
        ess=_rounded(values.get("ess")),
        reward=_rounded(values.get("reward_mean")),
        samples_per_second=rate,
    )


def last_training_status(message: str, before: TrainingStatus | None) -> TrainingStatus | None:
    """From what the trainer left as its container's message; the rate, which it lacks, stays that of `before`. None without."""
    last = training_status(Reading(0.0, parse_metrics(message.encode())), None)
    if last is None or before is None:
        return last
    return last.model_copy(update={"samples_per_second": before.samples_per_second})


def stream_status(now: Reading) -> StreamStatus | None:
    """From the preprocessor's metrics."""
    pending = now.values.get("stream_messages")
    if pending is None:
        return None
    return StreamStatus(
        pending=max(0, int(pending)), oldest_seconds=round(now.values.get("queue_oldest_seconds/stream", 0.0), 1)
    )


def _rounded(value: float | None) -> float | None:
    """Digits enough for a table, few enough that noise is no reason to write."""
    return None if value is None else float(f"{value:.4g}")
