"""Whether finished weights may go to the generators: some policies hold a publish back."""

import logging
from collections.abc import Callable

from pipelinerl_preprocessor.ledger import Ledger

log = logging.getLogger(__name__)


class PublishGate:
    """Asks the policy until it says yes, then remembers it; holds a version back for `max_hold_s`
    at most.

    As in the simulator, the next batch is not taken before the newest weights may go.
    """

    def __init__(self, ledger: Ledger, max_hold_s: float, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._max_hold_s = max_hold_s
        self._now = now
        self._allowed = -1
        self._held: tuple[int, float] | None = None
        self.num_forced = 0
        """Versions that the policy still held back at their deadline."""

    def may_publish(self, version: int) -> bool:
        """Whether `version` may go now. What was allowed once, or is served already, stays allowed."""
        if version <= max(self._allowed, self._ledger.state.served_version):
            return True
        if not self._ledger.policy.may_publish():
            if self._held is None or self._held[0] != version:
                self._held = (version, self._now())
            if self._now() - self._held[1] < self._max_hold_s:
                return False
            log.warning(
                "version=%d was held back for %g s, it is published now", version, self._max_hold_s
            )
            self.num_forced += 1
        self._allowed, self._held = version, None
        return True

    def holds_back(self) -> bool:
        """Whether the newest step's weights are wanted on the generators and may not go yet."""
        step = self._ledger.state.num_committed
        return (
            step > 0
            and self._ledger.policy.publishes_after(step - 1)
            and not self.may_publish(step)
        )

    def rewind(self) -> None:
        """Versions begin again at an older one."""
        self._allowed, self._held = -1, None
