"""What the operator's status shows of a job's metrics."""

from pipelinerl_control.readings import Reading
from pipelinerl_operator.controller.status import (
    StreamStatus,
    TrainingStatus,
    stream_status,
    training_status,
)


def test_the_rate_is_between_two_readings_and_unknown_after_a_restart() -> None:
    """600 samples in 20 s."""
    before = Reading(100.0, {"policy_version": 3.0, "samples_trained_total": 400.0})
    now = Reading(
        120.0, {"policy_version": 5.0, "samples_trained_total": 1000.0, "reward_mean": 0.123456}
    )
    assert training_status(now, before) == TrainingStatus(
        step=5, policy_version=5, reward=0.1235, samples_per_second=30.0
    )
    restarted = Reading(140.0, {"policy_version": 4.0, "samples_trained_total": 0.0})
    assert training_status(restarted, now) == TrainingStatus(step=4, policy_version=4)
    assert training_status(Reading(0.0, {}), None) is None


def test_the_streams_depth_and_age() -> None:
    values = {
        "stream_messages": 12.0,
        "queue_oldest_seconds/stream": 1.26,
        "queue_oldest_seconds/ready": 9.0,
    }
    assert stream_status(Reading(0.0, values)) == StreamStatus(pending=12, oldest_seconds=1.3)
    assert stream_status(Reading(0.0, {})) is None
