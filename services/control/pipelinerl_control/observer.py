"""What the coordinator observes: which generators answer and with which weights, and the epoch of
trainer rank 0.
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

PROBE_TIMEOUT_S = 5.0
MAX_SLOW_PROBES = 3
"""Consecutive probes without an answer after which a generator that was alive counts as gone: on a
busy machine a few are late.
"""


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where the members of a new group connect to each other."""

    address: str
    port: int


class TrainerClient:
    """Client of trainer rank 0's `Policy` service at `address()`, which is None while it has none.

    Each call opens a channel of its own, so that a restarted trainer is reached immediately.
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
        # A trainer of a release before all ranks sent has one member, whatever its ranks.
        return SeenTrainer(response.epoch, response.policy_version, response.num_ranks or 1)

    async def join_group(
        self, *, epoch: int, world_size: int, backend: str, port: int, timeout_s: float
    ) -> RendezvousAddress:
        """Opens the rendezvous of a new group and ends the old group. Raises PipelineRLError."""
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


@dataclass
class _Sight:
    """What is known about one generator."""

    name: str
    client: GeneratorClient
    seen: SeenGenerator | None = None
    has_returned: bool = False
    slow_probes: int = 0
    answered_at: float | None = None
    """Time of the last answer of a process that was not seen to end since."""
    error: str = "not asked yet"


class Observer:
    """Probes all generators and the trainer, and remembers since when each one answers."""

    def __init__(
        self, generators: Callable[[], Mapping[str, str]], trainer: TrainerClient, token: str | None
    ) -> None:
        self._generators = generators
        self._trainer = trainer
        self._token = token
        self._sights: dict[str, _Sight] = {}
        self.moved: frozenset[str] = frozenset()
        """Generators whose address changed in the last observation: they are other processes."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sights)

    def client(self, name: str) -> GeneratorClient:
        return self._sights[name].client

    def errors(self) -> dict[str, str]:
        """Why generators do not answer, by name of the generator."""
        return {name: sight.error for name, sight in self._sights.items() if sight.seen is None}

    def silent(self) -> dict[str, float]:
        """Seconds since the last answer of generators that stopped answering although their process
        was not seen to end, by name.
        """
        now = asyncio.get_running_loop().time()
        return {
            name: now - sight.answered_at
            for name, sight in self._sights.items()
            if sight.answered_at is not None and sight.seen is None
        }

    async def observe(self) -> Observation:
        """Probes once. Waits for the slowest probe, which ends by its own deadline."""
        self._follow(self._generators())
        if self._trainer.address() is None:  # no group can be formed: probe no generators
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
        await client.check_health(PROBE_TIMEOUT_S)
        return await client.weights(PROBE_TIMEOUT_S)
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
            sight.seen, sight.has_returned = None, True
        return
    sight.slow_probes, sight.answered_at = 0, now
    sight.seen = SeenGenerator(
        name=sight.name,
        num_workers=answer.num_workers,
        epoch=answer.epoch,
        served_version=answer.version,
        seen_since=sight.seen.seen_since if sight.seen else now,
        has_returned=sight.has_returned,
    )
