"""What a process tells the run about itself: its metrics of the moment, as the stream carries them."""

import time

from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_common.metrics.registry import Metrics

SCHEMA_VERSION = 1


def is_counter(key: str) -> bool:
    """Whether a record's value is a counter's: "groups_dropped_total{reason=stale}" is one."""
    return key.partition("{")[0].endswith("_total")


def record_of(metrics: Metrics, instance: str, step: int = -1) -> MetricsRecord:
    """All of them, now. `instance` is the workload's name; `step` the optimizer steps finished, -1
    when not tied to one.
    """
    return MetricsRecord(
        schema_version=SCHEMA_VERSION,
        job=metrics.job,
        role=metrics.role,
        instance=instance,
        time=time.time(),
        step=step,
        values=metrics.values(),
    )
