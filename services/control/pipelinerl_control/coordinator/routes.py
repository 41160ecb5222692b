"""Which job a call of the shared `WeightTransfer` service is for: the one whose bearer token it
carries.
"""

import hashlib
from typing import Any

from pipelinerl_common.errors import Unavailable
from pipelinerl_control.coordinator.coordinator import Coordinator


class TokenRoutes:
    """Coordinators by the hash of their job's token, so that looking one up takes no time that
    tells of another.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Coordinator] = {}

    def add(self, token: str, coordinator: Coordinator) -> None:
        self._by_digest[_digest(f"Bearer {token}")] = coordinator

    def remove(self, token: str) -> None:
        self._by_digest.pop(_digest(f"Bearer {token}"), None)

    def find(self, context: Any) -> Coordinator:
        """Raises Unavailable: an operator that has just begun to lead does not know every job yet,
        and callers try again.
        """
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization", "")
        coordinator = self._by_digest.get(
            _digest(given if isinstance(given, str) else given.decode("utf-8", "replace"))
        )
        if coordinator is None:
            raise Unavailable("no job of this operator that runs has this bearer token")
        return coordinator


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
