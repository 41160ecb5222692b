"""Errors of a weight transfer. Every one of them means: this group is finished, form a new one in
the next epoch.

TemporaryError
└── TransferFailed          a peer died, or the collective library gave up
    ├── TransferTimeout     the deadline passed
    └── TransferAborted     a member called the transfer off
"""

from pipelinerl_common.errors import TemporaryError


class TransferFailed(TemporaryError):
    """The transfer did not happen, or not for every member."""


class TransferTimeout(TransferFailed):
    """The deadline of an operation passed."""


class TransferAborted(TransferFailed):
    """A member called the transfer off; the message carries its reason."""
