"""Errors of a weight transfer. After any of them the group is unusable, and a new one is formed in
the next epoch.

TemporaryError
└── TransferFailed          a peer died, or the collective library gave up
    ├── TransferTimeout     the deadline passed
    └── TransferAborted     a member aborted the transfer
"""

from pipelinerl_common.errors import TemporaryError


class TransferFailed(TemporaryError):
    """A transfer that did not happen, or not for every member."""


class TransferTimeout(TransferFailed):
    """An operation that passed its deadline."""


class TransferAborted(TransferFailed):
    """A transfer that a member aborted; the message carries its reason."""
