"""What is true now: which generators answer, with which weights, and where the trainer stands."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipelinerl_control.coordinator.generator import GeneratorClient, ProbeResult
from pipelinerl_control.coordinator.membership import Observation, SeenGenerator
from pipelinerl_control.coordinator.trainer import TrainerClient

MAX_SLOW_PROBES = 3
"""A generator that was alive may leave this many probes in a row unanswered (a busy machine) before
it counts as gone.
"""


@dataclass
class _Sight:
    client: GeneratorClient
    seen: SeenGenerator | None = None
    was_away: bool = False
    slow_probes: int = 0
    answered_at: float | None = None
    """Of a process that has answered and was not seen to end since."""
    error: str = "not asked yet"


class Observer:
    """Probes everything at once and remembers only since when each generator has been answering."""

    def __init__(
        self, generators: Callable[[], Mapping[str, str]], trainer: TrainerClient, token: str | None
    ) -> None:
        self._generators = generators
        self._trainer = trainer
        self._token = token
        self._sights: dict[str, _Sight] = {}
        self.moved: frozenset[str] = frozenset()
        """Generators that came under another address with the last observation: other processes of
        the same names.
        """

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sights)

    def client(self, name: str) -> GeneratorClient:
        return self._sights[name].client

    def errors(self) -> dict[str, str]:
        """Why generators do not answer, by name."""
        return {name: sight.error for name, sight in self._sights.items() if sight.seen is None}

    def silent(self) -> dict[str, float]:
        """Generators whose process seems alive, since it was not seen to end, but that have stopped
        answering: for how many seconds, by name.
        """
        now = asyncio.get_running_loop().time()
        return {
            name: now - sight.answered_at
            for name, sight in self._sights.items()
            if sight.answered_at is not None and sight.seen is None
        }

    async def observe(self) -> Observation:
        """Takes as long as the slowest probe, which has a deadline."""
        self._follow(self._generators())
        if self._trainer.address() is None:  # nothing can be formed: generators need not be asked
            return Observation(asyncio.get_running_loop().time(), None, ())
        sights = list(self._sights.values())
        trainer, probes = await asyncio.gather(
            self._trainer.probe(), asyncio.gather(*(sight.client.probe() for sight in sights))
        )
        now = asyncio.get_running_loop().time()
        for sight, probe in zip(sights, probes, strict=True):
            _take(sight, probe, now)
        seen = tuple(sight.seen for sight in sights if sight.seen is not None)
        return Observation(now, trainer, seen, num_starting=len(sights) - len(seen))

    def _follow(self, urls: Mapping[str, str]) -> None:
        for gone in [name for name in self._sights if name not in urls]:
            del self._sights[gone]
        known = {name: sight.client.url for name, sight in self._sights.items()}
        self.moved = frozenset(name for name, url in known.items() if url != urls[name].rstrip("/"))
        for name, url in urls.items():
            if name not in known or name in self.moved:
                self._sights[name] = _Sight(GeneratorClient(name, url, self._token))


def _take(sight: _Sight, probe: ProbeResult, now: float) -> None:
    if probe.weights is None:
        sight.error = probe.error
        sight.slow_probes = sight.slow_probes + 1 if probe.is_slow else MAX_SLOW_PROBES
        if not probe.is_slow:
            sight.answered_at = None
        if sight.slow_probes >= MAX_SLOW_PROBES and sight.seen is not None:
            sight.seen, sight.was_away = None, True
        return
    sight.slow_probes, sight.answered_at = 0, now
    weights = probe.weights
    sight.seen = SeenGenerator(
        name=sight.client.name,
        num_workers=int(weights.get("num_workers", 1)),
        epoch=max(0, int(weights.get("epoch") or 0)),
        served_version=int(weights.get("version", -1)),
        seen_since=sight.seen.seen_since if sight.seen else now,
        was_away=sight.was_away,
    )
