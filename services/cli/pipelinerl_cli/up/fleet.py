"""The actors of one run, each with its generators: which there are, and how they come and go while
it runs.

```
 comes   generator-1-*, actor-1 start -> the generators join the weight-transfer group -> receive the weights -> sample
 goes    actor-1 finishes what it can and hands back the rest -> the generators leave the group -> and end
```
Neither touches the trainers, but that their group is formed again.
"""

import asyncio
import logging
from collections.abc import Callable

from pipelinerl_cli.up.supervisor import Supervisor
from pipelinerl_common.settings import Job
from pipelinerl_operator.coordinator import Coordinator
from pipelinerl_operator.plan import (
    Endpoints,
    Workload,
    generator_names,
    generator_url,
    plan,
    plan_workload,
    with_actors,
)

log = logging.getLogger(__name__)

ACTOR_GRACE_S = 15.0
"""Beyond `actors.drainSeconds`."""
LEAVING_GRACE_S = 30.0
"""Of a generator that has left the group while the run goes on: nobody waits for its end."""
LOOK_S = 0.1


class Fleet:
    """`job` has as many actors as there may ever be, and `endpoints` an address for everything of
    theirs; there are `count`.

    `changed` is called whenever one has come or gone.
    """

    def __init__(
        self, job: Job, endpoints: Endpoints, count: int, changed: Callable[[], None]
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
        """For the coordinator: generators that should be in the weight-transfer group."""
        names = (
            name for actor in sorted(self._actors) for name in generator_names(self._job, actor)
        )
        return {name: generator_url(self._endpoints.addresses[name]) for name in names}

    def workloads(self) -> tuple[Workload, ...]:
        """Every process of the run, in start order."""
        return plan(self.job, self._endpoints)

    def ready(self, supervisor: Supervisor, coordinator: Coordinator) -> frozenset[str]:
        """Actors that run and have every generator in the group, each start of one by an id of its
        own.

        While a group is formed its generators go on sampling: until then the last one counts.
        """
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
        """Starts who is missing; then ends who is too many, the last first, and returns when they
        have ended.
        """
        come = [actor for actor in range(count) if actor not in self._actors]
        go = [actor for actor in sorted(self._actors, reverse=True) if actor >= count]
        for actor in come:
            self._actors.add(actor)
            names = (*generator_names(self._job, actor), _name(actor))
            supervisor.add(plan_workload(self._job, self._endpoints, name) for name in names)
            self._changed()
        coordinator.wake()
        await asyncio.gather(*(self._let_go(actor, supervisor, coordinator) for actor in go))

    async def _let_go(self, actor: int, supervisor: Supervisor, coordinator: Coordinator) -> None:
        generators = generator_names(self._job, actor)
        await supervisor.retire(_name(actor), self._job.spec.actors.drain_seconds + ACTOR_GRACE_S)
        self._actors.discard(actor)
        self._changed()
        coordinator.wake()
        await self._until_out(generators, coordinator)
        await asyncio.gather(*(supervisor.retire(name, LEAVING_GRACE_S) for name in generators))

    async def _until_out(self, generators: tuple[str, ...], coordinator: Coordinator) -> None:
        """Until no update counts on them. One that ends while it is a member is expelled, which
        takes longer.
        """
        deadline = (
            asyncio.get_running_loop().time() + self._job.spec.weight_transfer.sync_timeout_seconds
        )
        while coordinator.group is not None and not set(generators).isdisjoint(
            coordinator.group.names
        ):
            if asyncio.get_running_loop().time() > deadline:
                log.warning(
                    "%s end as members of epoch %d", ", ".join(generators), coordinator.group.epoch
                )
                return
            await asyncio.sleep(LOOK_S)


def _name(actor: int) -> str:
    return f"actor-{actor}"
