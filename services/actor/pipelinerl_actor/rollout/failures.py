"""What can go wrong with a trajectory, sorted: tried again, given up, or the actor's end.

TemporaryError   tried again, `task.maxRetries` times
PermanentError   the trajectory is given up and counted by a short reason
SettingsError, FatalError   the actor ends

A task's own exception is a PermanentError unless it is a TemporaryError. A generator that is away
(Unavailable) is no failure: requests wait for one that is not.
"""

import random

from pipelinerl_common.errors import FatalError, PermanentError, SettingsError
from pipelinerl_common.text import counted


class GivenUp(PermanentError):
    """A trajectory ends without a sample. `reason` is a short word for counters, for example
    "verifier_timeout".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def exhausted(reason: str, num_failures: int, max_retries: int, error: Exception) -> GivenUp | None:
    """What to raise from `error` when the tries have run out, of which `num_failures` have failed;
    None before.
    """
    if num_failures <= max_retries:
        return None
    return GivenUp(reason, f"{counted(num_failures, 'try', 'tries')}, the last: {error}")


FATAL = (SettingsError, FatalError)

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


def backoff_s(num_failures: int) -> float:
    """Seconds to wait after `num_failures` (at least 1) in a row: doubling, with jitter so that
    many do not return at once.
    """
    longest_s = min(_FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 10), _MAX_BACKOFF_S)
    return longest_s * random.uniform(0.5, 1.0)
