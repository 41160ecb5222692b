"""Which session of each actor is the current one: an actor that starts anew comes with a new
session id.
"""


class Sessions:
    """Newest session per actor. Actors that were silent for `forget_s` are forgotten."""

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._newest: dict[str, tuple[str, float]] = {}

    def heard_of(self, actor_id: str, session_id: str, now: float) -> bool:
        """Notes a call. True when this session was not the actor's current one until now."""
        new = self._newest.get(actor_id, ("", 0.0))[0] != session_id
        self._newest[actor_id] = (session_id, now)
        return new

    def is_current(self, actor_id: str, session_id: str) -> bool:
        """Whether no newer session of the actor was heard of."""
        return self._newest.get(actor_id, (session_id, 0.0))[0] == session_id

    def forget_silent(self, now: float) -> None:
        self._newest = {
            actor: seen for actor, seen in self._newest.items() if now - seen[1] < self._forget_s
        }

    def actors(self) -> list[str]:
        """Those that are there, in the order of their names."""
        return sorted(self._newest)

    def __len__(self) -> int:
        return len(self._newest)
