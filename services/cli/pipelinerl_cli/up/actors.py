"""The actors of one run, each with its generators: which there are, how they are added and removed
while the run continues, and how `autoscale` chooses their number.

```
 added    generator-1-*, actor-1 start -> the generators join the weight-transfer group -> receive
          the weights -> sample
 removed  actor-1 finishes what it can and hands back the rest -> the generators leave the group
          -> and end
 every 2 s, with autoscale: /metrics of trainer-0 and preprocessor-0 -> look -> autoscale.json
          -> display -> Fleet.resize
```
Neither touches the trainers, apart from a newly formed group. The choice is the operator's own.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from pipelinerl_cli.up.supervisor import Supervisor
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.files import write_whole
from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_control.balance import Counts, Period
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.metrics import ActorScale
from pipelinerl_control.plan import (
    Endpoints,
    PlannedProcess,
    generator_names,
    generator_url,
    plan,
    plan_process,
    with_actors,
)
from pipelinerl_control.readings import read_metrics
from pipelinerl_control.scaling import ScalingChoice, look, num_actors

log = logging.getLogger(__name__)

ACTOR_GRACE_S = 15.0
"""Beyond `actors.drainSeconds`."""
LEAVING_GRACE_S = 30.0
"""A generator that has left the group while the run continues: nothing waits for its end."""
LOOK_S = 0.1
READ_S = 2.0
TRAINER, PREPROCESSOR = "trainer-0", "preprocessor-0"


class Fleet:
    """The actors that there are, at first `count`.

    `job` has as many actors as there may ever be, and `endpoints` an address for each of their
    processes. `changed` is called with the present job whenever an actor was added or removed.
    """

    def __init__(
        self, job: Job, endpoints: Endpoints, count: int, changed: Callable[[Job], None]
    ) -> None:
        self._job = job
        self._endpoints = endpoints
        self._actors = set(range(count))
        self._changed = changed
        self._members: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self._actors)

    @property
    def job(self) -> Job:
        """With the actors that there are."""
        return with_actors(self._job, self.size)

    def generator_urls(self) -> dict[str, str]:
        """The generators that should be in the weight-transfer group, for the coordinator."""
        return {
            name: generator_url(self._endpoints.addresses[name])
            for actor in sorted(self._actors)
            for name in generator_names(self._job, actor)
        }

    def planned(self) -> Sequence[PlannedProcess]:
        """Every process of the run, in start order."""
        return plan(self.job, self._endpoints)

    def ready(self, supervisor: Supervisor, coordinator: Coordinator) -> frozenset[str]:
        """Actors that run and have every generator in the group, with their process ids, so that a
        restarted actor counts as another one.
        """
        # While a group is being formed its generators continue to sample: the last one counts.
        if coordinator.group is not None:
            self._members = frozenset(coordinator.group.names)
        running = supervisor.running
        return frozenset(
            f"{_name(actor)}/{running[_name(actor)].pid}"
            for actor in self._actors
            if _name(actor) in running
            and self._members.issuperset(generator_names(self._job, actor))
        )

    async def resize(self, count: int, supervisor: Supervisor, coordinator: Coordinator) -> None:
        """Starts the actors that are missing; then removes those above `count`, the last first, and
        returns when they have ended.
        """
        for actor in range(count):
            if actor not in self._actors:
                self._actors.add(actor)
                names = (*generator_names(self._job, actor), _name(actor))
                supervisor.add(plan_process(self._job, self._endpoints, name) for name in names)
                self._changed(self.job)
        coordinator.wake()
        surplus = [actor for actor in sorted(self._actors, reverse=True) if actor >= count]
        await asyncio.gather(*(self._remove(actor, supervisor, coordinator) for actor in surplus))

    async def _remove(self, actor: int, supervisor: Supervisor, coordinator: Coordinator) -> None:
        generators = generator_names(self._job, actor)
        await supervisor.retire(_name(actor), self._job.spec.actors.drain_seconds + ACTOR_GRACE_S)
        self._actors.discard(actor)
        self._changed(self.job)
        coordinator.wake()
        # A generator that ends while it is a member is expelled, which takes longer than to leave.
        await self._until_out(generators, coordinator)
        await asyncio.gather(*(supervisor.retire(name, LEAVING_GRACE_S) for name in generators))

    async def _until_out(self, generators: tuple[str, ...], coordinator: Coordinator) -> None:
        """Waits until no weight update depends on these generators, for one update at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._job.spec.weight_transfer.sync_timeout_seconds
        while (group := coordinator.group) and not set(generators).isdisjoint(group.names):
            if loop.time() > deadline:
                log.warning("%s end as members of epoch %d", ", ".join(generators), group.epoch)
                return
            await asyncio.sleep(LOOK_S)


def _name(actor: int) -> str:
    return f"actor-{actor}"


class ChoiceFile:
    """The chosen number of actors, kept for the next session of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> ScalingChoice | None:
        """None without one. Raises SettingsError when it cannot be read."""
        try:
            return ScalingChoice.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise SettingsError(
                f"{self._path}: cannot be read: {error}; remove it, and the choice starts again "
                "from actors.replicas"
            ) from error

    def write(self, choice: ScalingChoice) -> None:
        write_whole(self._path, choice.model_dump_json(by_alias=True) + "\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class Autoscaler:
    """Chooses the number of actors during one session. Without `autoscale` it is the job file's."""

    def __init__(self, spec: JobSpec, file: ChoiceFile, note: Callable[[str], None]) -> None:
        self._spec = spec
        self._file = file
        self._note = note
        self._period = Period()
        if not spec.autoscale.enabled:
            file.remove()
        self._choice = file.read()

    @property
    def num_actors(self) -> int:
        """The number of actors that there should be."""
        return num_actors(self._spec, self._choice)

    def scale(self, num_ready: int) -> ActorScale:
        ratio = None if self._choice is None else self._choice.ratio
        return ActorScale(self.num_actors, num_ready, ratio)

    async def run(
        self, fleet: Fleet, endpoints: Endpoints, supervisor: Supervisor, coordinator: Coordinator
    ) -> None:
        """Runs until cancelled. Consumes the metrics of the run, produces choices, and waits for
        the next reading and for actors that are being removed.
        """
        addresses = endpoints.metrics_addresses
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                # Process ids are read before the metrics: counts of a process that restarts in
                # between must not be taken for the new one's.
                actors = fleet.ready(supervisor, coordinator)
                others = tuple(
                    f"{name}/{process.pid}"
                    for name, process in supervisor.running.items()
                    if name in (TRAINER, PREPROCESSOR)
                )
                trainer = await read_metrics(session, addresses[TRAINER])
                preprocessor = await read_metrics(session, addresses[PREPROCESSOR])
                if trainer is not None and preprocessor is not None:
                    self.look(Counts.of(trainer, preprocessor, actors, others))
                if fleet.size != self.num_actors:
                    await fleet.resize(self.num_actors, supervisor, coordinator)
                await asyncio.sleep(READ_S)

    def look(self, counts: Counts | None) -> None:
        """Takes a reading, and makes a choice when one is due."""
        self._period.take(counts, None if self._choice is None else self._choice.step)
        step = None if counts is None else counts.step
        looked = look(self._spec, self._choice, step, self._period.balance)
        if looked is None:
            return
        try:
            # Written before it is acted on: the next session must know of it.
            self._file.write(looked.choice)
        except OSError as error:  # a full disk; the next reading tries again
            log.warning(
                "actors stay %d, the new choice cannot be written: %s", self.num_actors, error
            )
            return
        self._choice = looked.choice
        self._period.restart()
        if looked.why:
            log.info("%s", looked.why)
            self._note(looked.why)
