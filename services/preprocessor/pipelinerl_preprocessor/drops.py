"""Why a group is not trained: every drop has one of these reasons and is counted under it."""

from collections.abc import Mapping
from enum import StrEnum


class DropReason(StrEnum):
    """The label `reason` of `groups_dropped_total`."""

    ROLLBACK = "rollback"
    """The group belongs to a timeline that a restore left."""
    UNKNOWN = "unknown"
    """No such group was ever granted."""
    DUPLICATE = "duplicate"
    """The group has already finished once, under another attempt, or has already ended."""
    MISMATCH = "mismatch"
    """The message contradicts the lease: another prompt, or more samples than the group has."""
    TEMPERATURE = "temperature"
    """The tokens were drawn at another temperature than the job's, so their log-probs cannot be
    trained.
    """
    NON_FINITE = "non_finite"
    """A reward or log-prob is NaN or infinite."""
    BAD_VERSION = "bad_version"
    """A token carries a version that the trainer has not reached, or a negative one."""
    TOO_FEW_SAMPLES = "too_few_samples"
    """Not enough trajectories for the baseline."""
    ZERO_ADVANTAGE = "zero_advantage"
    """All rewards are equal and `dropZeroAdvantage` is set."""
    NO_TOKENS = "no_tokens"
    """Nothing to train: every completion is empty, masked or over-long."""
    REFERENCE = "reference"
    """The reference generators could not score it."""
    RING_BUFFER = "ring_buffer"
    """It waited longest when the ring buffer overflowed."""
    STALE = "stale"
    """The staleness policy dropped it when a batch was assembled (layer 3)."""
    CANCELLED = "cancelled"
    """The staleness policy cancelled it while it ran: at a publish, or on a load report (layer 2).
    """
    UNFINISHED = "unfinished"
    """The run ended while it was generated."""
    EXPIRED = "expired"
    """Its last permitted attempt ended without a result."""
    FAILED = "failed"
    """The actor gave it up."""


LAYERS: Mapping[str, str] = {DropReason.CANCELLED: "running", DropReason.STALE: "assembly"}
"""Layers of the staleness policy, beyond admission, by the reason under which their drops are
counted.
"""
