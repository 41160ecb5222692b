"""In-flight weight updates: the trainer's, the coordinator's and the generators' side."""

from typing import Final

from pipelinerl_common.metrics.metric import (
    COORDINATOR,
    GENERATOR,
    PREPROCESSOR,
    REFERENCE,
    SECONDS,
    TRAINER,
    Kind,
    Metric,
    counter,
    gauge,
)

_ENGINES: Final = (GENERATOR, REFERENCE)
_MODES: Final = {"mode": ("staged", "inplace")}

WEIGHTS: Final[tuple[Metric, ...]] = (
    gauge(
        "served_version",
        "steps",
        (TRAINER, PREPROCESSOR, COORDINATOR),
        "Policy version that the generators serve, as far as this process knows; -1 before the "
        "first.",
    ),
    counter("weight_updates_total", "updates", (TRAINER,), "Versions that were published."),
    counter(
        "weight_update_failures_total",
        "updates",
        (TRAINER,),
        "Attempts to publish a version that failed.",
    ),
    gauge(
        "publish_seconds",
        "seconds",
        (TRAINER,),
        "Newest update, from the request to the last generator's answer.",
    ),
    gauge(
        "pause_seconds",
        "seconds",
        (TRAINER,),
        "Newest update: time without decoding, of the slowest generator.",
    ),
    gauge(
        "transfer_seconds",
        "seconds",
        (TRAINER,),
        "Newest update: time of the broadcast, of the slowest generator.",
    ),
    gauge(
        "apply_seconds",
        "seconds",
        (TRAINER,),
        "Newest update: time to load and put in place, of the slowest generator.",
    ),
    gauge(
        "update_bytes",
        "bytes",
        (TRAINER,),
        "Newest update: bytes that each generator was sent; with an adapter, its alone.",
    ),
    gauge(
        "weight_version",
        "steps",
        _ENGINES,
        "Policy version of this generator's weights; -1 before the first update.",
    ),
    gauge(
        "weight_epoch",
        "epochs",
        _ENGINES,
        "Epoch of the weight-transfer group that this generator is in; 0 for none.",
    ),
    counter(
        "weight_updates_applied_total",
        "updates",
        _ENGINES,
        "Updates that this generator took.",
        _MODES,
    ),
    counter(
        "weight_update_errors_total",
        "updates",
        _ENGINES,
        "Updates that this generator did not take, by the error.",
        {"reason": ()},
    ),
    Metric(
        "weight_pause_seconds",
        Kind.HISTOGRAM,
        "seconds",
        _ENGINES,
        "Updates by the time without decoding.",
        _MODES,
        SECONDS,
    ),
    Metric(
        "weight_transfer_seconds",
        Kind.HISTOGRAM,
        "seconds",
        _ENGINES,
        "Updates by the time from being ready for the first bytes to having the last.",
        _MODES,
        SECONDS,
    ),
    gauge(
        "transfer_group_epoch",
        "epochs",
        (COORDINATOR,),
        "Epoch of the weight-transfer group; 0 while there is none.",
    ),
    gauge(
        "transfer_group_members",
        "generators",
        (COORDINATOR,),
        "Generators in the weight-transfer group.",
    ),
    gauge(
        "generators_expected", "generators", (COORDINATOR,), "Generators that the job should have."
    ),
    gauge("generators_absent", "generators", (COORDINATOR,), "Generators that do not answer."),
    counter(
        "transfer_groups_formed_total",
        "groups",
        (COORDINATOR,),
        "Weight-transfer groups that were formed.",
    ),
    counter(
        "transfer_group_failures_total",
        "groups",
        (COORDINATOR,),
        "Weight-transfer groups that did not form.",
    ),
    counter(
        "updates_coordinated_total",
        "updates",
        (COORDINATOR,),
        "Updates that were fanned out to the members.",
        {"outcome": ("published", "failed")},
    ),
    counter(
        "member_expulsions_total",
        "generators",
        (COORDINATOR,),
        "Generators that were left out of the group after a fault.",
    ),
)
