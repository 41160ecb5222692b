"""The coordinator's view of trainer rank 0: the `Policy` service.

What is true now: which generators answer, with which weights, and where the trainer stands.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipelinerl.v1 import policy_pb2, policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.errors import PipelineRLError, Unavailable
from pipelinerl_common.generator_api import WeightsResponse
from pipelinerl_common.generator_client import GeneratorClient, GeneratorError, NoAnswer
from pipelinerl_control.membership import Observation, SeenGenerator, SeenTrainer

PROBE_TIMEOUT_S, GENERATOR_PROBE_S = 5.0, 5.0


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where a group meets."""

    address: str
    port: int


class TrainerClient:
    """Calls to `Policy` at `address()`, None while there is none; a fresh channel each, so that a
    restarted trainer is reached at once.
    """

    def __init__(self, address: Callable[[], str | None], token: str | None) -> None:
        self.address = address
        self._token = token

    async def probe(self) -> SeenTrainer | None:
        """The trainer's epoch and policy version, or None while it does not answer."""
        address = self.address()
        if address is None:
            return None
        try:
            async with rpc.connect(address, token=self._token) as channel:
                method = policy_pb2_grpc.PolicyStub(channel).GetPolicy
                response = await rpc.call(
                    method, policy_pb2.GetPolicyRequest(), timeout_s=PROBE_TIMEOUT_S
                )
        except PipelineRLError:
            return None
        return SeenTrainer(response.epoch, response.policy_version)

    async def join_group(
        self, *, epoch: int, world_size: int, backend: str, port: int, timeout_s: float
    ) -> RendezvousAddress:
        """Opens the rendezvous of a new group, ending the old one. Raises PipelineRLError."""
        request = policy_pb2.JoinGroupRequest(
            epoch=epoch, world_size=world_size, backend=backend, port=port, timeout_s=timeout_s
        )
        address = self.address()
        if address is None:
            raise Unavailable("the trainer has no address")
        async with rpc.connect(address, token=self._token) as channel:
            response = await rpc.call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup, request, timeout_s=timeout_s
            )
        return RendezvousAddress(response.master_address, response.master_port)


MAX_SLOW_PROBES = 3
"""A generator that was alive may leave this many probes in a row unanswered (a busy machine) before
it counts as gone.
"""


@dataclass
class _Sight:
    name: str
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
            self._trainer.probe(), asyncio.gather(*(_probe(sight.client) for sight in sights))
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
                self._sights[name] = _Sight(name, GeneratorClient(url, self._token))


async def _probe(client: GeneratorClient) -> WeightsResponse | GeneratorError:
    """The weights of a generator that is alive, else why it is not."""
    try:
        await client.check_health(GENERATOR_PROBE_S)
        return await client.weights(GENERATOR_PROBE_S)
    except GeneratorError as error:
        return error


def _take(sight: _Sight, answer: WeightsResponse | GeneratorError, now: float) -> None:
    if isinstance(answer, GeneratorError):
        sight.error = str(answer)
        # A busy machine may keep a generator that is alive from answering in time.
        is_slow = isinstance(answer, NoAnswer)
        sight.slow_probes = sight.slow_probes + 1 if is_slow else MAX_SLOW_PROBES
        if not is_slow:
            sight.answered_at = None
        if sight.slow_probes >= MAX_SLOW_PROBES and sight.seen is not None:
            sight.seen, sight.was_away = None, True
        return
    sight.slow_probes, sight.answered_at = 0, now
    sight.seen = SeenGenerator(
        name=sight.name,
        num_workers=answer.num_workers,
        epoch=answer.epoch,
        served_version=answer.version,
        seen_since=sight.seen.seen_since if sight.seen else now,
        was_away=sight.was_away,
    )
