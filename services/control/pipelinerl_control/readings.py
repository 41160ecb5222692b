"""Metrics that `pipelinerl up` and the operator read from a job's own processes."""

import asyncio
import re
from dataclasses import dataclass

import aiohttp

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
"""Names of the metrics that are kept, of the hundreds that a job exports."""
_LINE = re.compile(
    rb"^pipelinerl_(\w+)(?:\{([^}]*)\})? ([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?: \d+)?$",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(?:^|,)(?:stage|phase|reason)="(\w+)"')


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of one scrape by name, with a stage, phase or reason as "name/stage".

    `at` is in monotonic seconds.
    """

    at: float
    values: dict[str, float]


async def read_metrics(session: aiohttp.ClientSession, address: str) -> Reading | None:
    """Reads `/metrics` at "host:port"; None while it does not answer."""
    try:
        async with session.get(
            f"http://{address}/metrics", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        ) as response:
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
    """Parses Prometheus' text format. Example: {"reward_mean": 0.4, "queue_groups/ready": 3.0}."""
    values: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        key = name.decode()
        if key in READ:
            label = _LABEL.search(labels)
            values[f"{key}/{label[1].decode()}" if label else key] = float(value)
    return values
