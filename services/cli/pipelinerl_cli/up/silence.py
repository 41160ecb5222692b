"""Generators that have stopped answering though they run: said while it lasts, and ended when it
has lasted too long.
"""

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LIMIT_S = 180.0
"""Then the process is ended, and started again like one that has crashed; the kubelet waits as
long.
"""
LOOK_S = 1.0
RECORD = "silent_{name}_seconds"
"""Name of the value in the records of `pipelinerl up`; 0 once the generator answers again or was
ended.
"""
_RECORDED = re.compile(RECORD.format(name="(.+)"))


def silent_name(value_name: str) -> str | None:
    """Whose silence a value is, None of another value. Example: "silent_generator-0-0_seconds" is
    generator-0-0's.
    """
    found = _RECORDED.fullmatch(value_name)
    return found[1] if found else None


@dataclass
class Silence:
    """`note` says something to the user, `record` keeps a value for `pipelinerl doctor`, `end` ends
    a process by its name.
    """

    note: Callable[[str], None]
    record: Callable[[str, float], None]
    end: Callable[[str], None]
    _next_s: dict[str, float] = field(default_factory=dict)
    """Of each silent one: how long it is silent when it is spoken of again; infinite once it was
    ended.
    """

    async def watch(self, silent: Callable[[], Mapping[str, float]]) -> None:
        """Looks once a second until cancelled."""
        while True:
            self.look(silent())
            await asyncio.sleep(LOOK_S)

    def look(self, silent: Mapping[str, float]) -> None:
        """`silent` has the seconds since the last answer by name. Speaks at once, and each time the
        silence has doubled.
        """
        for name in [name for name in self._next_s if name not in silent]:
            if self._next_s[name] < math.inf:
                self.note(f"{name} answers again, or has ended")
            self._forget(name)
        for name, seconds in silent.items():
            if seconds < self._next_s.get(name, 0.0):
                continue
            if seconds >= LIMIT_S:
                self._next_s[name] = math.inf
                self.note(
                    f"{name} has not answered for {seconds:.0f} s: it is ended and started again"
                )
                self.end(name)
            else:
                self._next_s[name] = min(2 * seconds, LIMIT_S)
                self.record(RECORD.format(name=name), seconds)
                self.note(explained(name, seconds))

    def _forget(self, name: str) -> None:
        del self._next_s[name]
        self.record(RECORD.format(name=name), 0.0)


def explained(name: str, seconds: float) -> str:
    """What is so, and what will happen."""
    return (
        f"{name} has not answered for {seconds:.0f} s; after {LIMIT_S:.0f} s it is ended and "
        "started again"
    )
