"""How training goes, read from the metrics of the job's own processes."""

from pipelinerl_control.readings import Reading, parse_metrics
from pipelinerl_operator.controller.status import StreamStatus, TrainingStatus


def training_status(now: Reading, before: Reading | None) -> TrainingStatus | None:
    """From the trainer's metrics; None before the first step is counted. The rate is over the time
    between two readings.
    """
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
    """From what the trainer left as its container's message; the rate, which it lacks, stays that
    of `before`. None without.
    """
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
        pending=max(0, int(pending)),
        oldest_seconds=round(now.values.get("queue_oldest_seconds/stream", 0.0), 1),
    )


def _rounded(value: float | None) -> float | None:
    """Digits enough for a table, few enough that noise is no reason to write."""
    return None if value is None else float(f"{value:.4g}")
