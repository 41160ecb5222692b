"""Errors that cross a module's boundary.

PipelineRLError
├── SettingsError          the user's input is wrong: names field, value and remedy; exit status 2
├── TemporaryError         trying again later may work
│   └── Unavailable        a peer is unreachable or not ready yet
├── PermanentError         trying again cannot work
│   ├── MalformedMessage   bytes from the wire break their contract: set aside, counted, not retried
│   └── Refused            a peer understood the request and refuses it
└── FatalError             this process must end and be restarted: its state is not to be trusted
"""


class PipelineRLError(Exception):
    """Base of every error that this project raises on purpose."""


class SettingsError(PipelineRLError):
    """The user's input is wrong. The message names the field, the value and the remedy."""


class TemporaryError(PipelineRLError):
    """Trying again later may work."""


class Unavailable(TemporaryError):
    """A peer is unreachable or not ready yet."""


class PermanentError(PipelineRLError):
    """Trying again cannot work."""


class MalformedMessage(PermanentError):
    """Bytes from the wire break their contract. `reason` is one word for counters, for example
    "version_runs".
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class Refused(PermanentError):
    """A peer understood the request and refuses it."""


class FatalError(PipelineRLError):
    """This process must end and be restarted: its state is not to be trusted."""
