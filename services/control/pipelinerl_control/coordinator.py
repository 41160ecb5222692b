"""The weight-transfer coordinator: forms the group of trainer and generators and fans updates out.

```
 reconcile loop, about once a second          PublishVersion, from trainer rank 0
 ---------------------------------           -----------------------------------
 observe  probe generators and trainer        refuse a wrong epoch
 decide   membership.decide (pure)            POST /request_weight_update to every member
 act      form the group                      expel who failed; wake the loop
```
Both change the group, but never at the same time: no group is formed while an update runs, and an
update is refused while a group is being formed.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from pipelinerl.v1 import weights_pb2
from pipelinerl_common import tracing
from pipelinerl_common.errors import PipelineRLError, Refused, Unavailable
from pipelinerl_common.generator_api import UpdateRequest, UpdateResponse
from pipelinerl_common.generator_client import ANSWER_GRACE_S, GeneratorClient
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_control.membership import (
    Form,
    MemberBackoff,
    Observation,
    Standing,
    WeightGroup,
    decide,
)
from pipelinerl_control.observer import Observer, TrainerClient
from pipelinerl_control.transfer import TransferOutcome, form_group, update_members
from pipelinerl_weights.manifest import Manifest

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Pause after a failed attempt to form a group that no generator caused."""


@dataclass
class CoordinatorCounters:
    """What the coordinator has done since it started."""

    groups_formed: int = 0
    form_failures: int = 0
    updates: int = 0
    update_failures: int = 0
    expulsions: int = 0


class Coordinator:
    """The weight-transfer group of one job.

    `generators` returns the base URLs of all generators that should exist by name,
    `trainer_address` the "host:port" of trainer rank 0 or None while it has none. Epochs start
    above `epoch_floor`, the last known one, and are never reused.
    """

    def __init__(
        self,
        settings: WeightTransferSettings,
        generators: Callable[[], Mapping[str, str]],
        trainer_address: Callable[[], str | None],
        *,
        token: str | None,
        settle_s: float = 2.0,
        epoch_floor: int = 0,
    ) -> None:
        self.counters = CoordinatorCounters()
        self.waiting_for = "starting"
        """What the group lacks to be complete, as a text for people."""
        self.period_s = 1.0
        """Seconds between two rounds when nothing wakes the coordinator."""
        self.tracer = tracing.Tracer()
        self._settings = settings
        self._trainer = TrainerClient(trainer_address, token)
        self._observer = Observer(generators, self._trainer, token)
        self._standing = Standing(settle_s=settle_s, epoch_floor=epoch_floor)
        self._forming = False
        self._clients: dict[str, GeneratorClient] = {}
        """Clients of the group's members by name."""
        self._served: dict[str, int] = {}
        self._manifest: tuple[weights_pb2.WeightManifest, str] | None = None
        """The manifest of the group's updates and its hash, from the first update on."""
        self._backoff = MemberBackoff()
        self._is_due = False
        self._sleep: asyncio.Future[None] | None = None
        """Completes when the next round is due. A future is smaller than an Event, and the operator
        has one coordinator per job.
        """
        self._transfers: set[asyncio.Task[TransferOutcome]] = set()

    @property
    def group(self) -> WeightGroup | None:
        return self._standing.group

    @property
    def absent(self) -> dict[str, str]:
        """Generators that do not answer, with the reason."""
        return self._observer.errors()

    @property
    def silent(self) -> dict[str, float]:
        """Seconds since the last answer of generators that stopped answering without having been
        seen to end, by name.
        """
        return self._observer.silent()

    @property
    def num_expected(self) -> int:
        """Generators that should exist."""
        return len(self._observer.names)

    @property
    def served_version(self) -> int:
        """Lowest version over the members; -1 before the first update or without members."""
        names = self._standing.group.names if self._standing.group else ()
        return min((self._served.get(name, -1) for name in names), default=-1)

    def wake(self) -> None:
        """Starts the next round now, because something changed."""
        self._is_due = True
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    async def run(self) -> None:
        """Reconciles until cancelled. Consumes observations, produces formed groups, waits for
        `period_s`, is unblocked by `wake`.
        """
        while True:
            await self.round()

    async def round(self) -> None:
        """Reconciles once, then waits for `period_s` or a wake-up, whichever comes first."""
        # Cleared before the round, not after: a wake-up during it must lead to another round.
        self._is_due = False
        await self.reconcile()
        if self._is_due:
            return
        self._sleep = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.period_s):
                await self._sleep
        except TimeoutError:
            pass

    async def reconcile(self) -> None:
        """Runs one round of observe, decide and act."""
        seen = await self._observer.observe()
        self._backoff.keep_only(
            [name for name in self._observer.names if name not in self._observer.moved]
        )
        decision = decide(seen, self._standing, self._backoff)
        if isinstance(decision, Form):
            await self._form(decision, seen)
        else:
            self.waiting_for = decision.reason

    async def publish(
        self,
        epoch: int,
        version: int,
        manifest: weights_pb2.WeightManifest,
        *,
        allow_rollback: bool,
        timeout_s: float,
    ) -> TransferOutcome:
        """Updates every member to `version`. `manifest` may be empty but in a group's first update.

        Raises Refused for a wrong epoch, a busy group or a missing manifest, Unavailable without
        members.
        """
        group = self._current_group(epoch)
        timeout_s = min(
            self._settings.sync_timeout_seconds, timeout_s or self._settings.sync_timeout_seconds
        )
        if manifest.tensors:
            self._manifest = (manifest, Manifest.from_proto(manifest).hash)
        if self._manifest is None:
            raise Refused(f"epoch {epoch}: its first update must carry the manifest")
        manifest, manifest_hash = self._manifest
        try:
            request = UpdateRequest(
                epoch=epoch,
                version=version,
                manifest_hash=manifest_hash,
                mode=self._settings.mode,
                kv_cache=self._settings.kv_cache,
                allow_rollback=allow_rollback,
                timeout_s=timeout_s,
            )
        except ValidationError as error:
            raise Refused(f"not an update that generators can take: {error}") from error
        self._standing.transfer_deadline = (
            asyncio.get_running_loop().time() + timeout_s + 2 * ANSWER_GRACE_S
        )
        task = asyncio.create_task(
            self._transfer(group, request, manifest, tracing.caller()),
            name=f"transfer {version}",
        )
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)
        # The members are in the middle of the update, even when the caller disconnects.
        return await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._transfers:
            task.cancel()
        await asyncio.gather(*self._transfers, return_exceptions=True)

    def _current_group(self, epoch: int) -> WeightGroup:
        group = self._standing.group
        if self._forming or group is None:
            raise Refused(f"epoch {epoch}: a group is being formed; wait for JoinGroup")
        if epoch != group.epoch:
            raise Refused(
                f"epoch {epoch} is not the current one, {group.epoch}; wait for JoinGroup"
            )
        if self._standing.transfer_deadline is not None:
            raise Refused(f"epoch {epoch}: an update is running")
        if not group.members:
            raise Unavailable("no generator is a member")
        return group

    async def _transfer(
        self,
        group: WeightGroup,
        request: UpdateRequest,
        manifest: weights_pb2.WeightManifest,
        traceparent: str,
    ) -> TransferOutcome:
        members = dict(self._clients)

        async def abort() -> None:
            await self._abandon(group)

        try:
            with self.tracer.continued(
                "update generators", traceparent, version=request.version, members=len(members)
            ):
                outcome = await update_members(members, request, manifest, abort)
            await self._conclude(group, outcome, request.version)
            return outcome
        finally:
            if self._standing.group is group or self._standing.group is None:
                self._standing.transfer_deadline = None
            self.wake()

    async def _conclude(self, group: WeightGroup, outcome: TransferOutcome, version: int) -> None:
        for name, reply in outcome.replies.items():
            if isinstance(reply, UpdateResponse) and name not in outcome.expelled:
                self._served[name] = version
                self._backoff.succeeded(name)
        if outcome.published:
            self.counters.updates += 1
        else:
            self.counters.update_failures += 1
        if outcome.published and not outcome.expelled:
            return
        if self._standing.group is group:
            self._standing.group = None
        trainer = await self._trainer.probe()
        # When the trainer restarted, all members failed because of it: expel none of them.
        if trainer is None or (trainer.epoch != group.epoch and not outcome.aborted):
            log.warning("version=%d failed with the trainer; no generator is to blame", version)
            return
        self._leave_out(outcome.expelled)

    async def _abandon(self, group: WeightGroup) -> None:
        """Ends the group at the trainer, and with it every collective that a member waits in."""
        self._standing.group = None
        self._standing.epoch_floor = max(self._standing.epoch_floor, group.epoch + 1)
        try:
            await self._trainer.join_group(
                epoch=self._standing.epoch_floor,
                world_size=1,
                backend=self._settings.backend,
                port=0,
                timeout_s=self._settings.form_timeout_seconds,
            )
        except PipelineRLError as error:
            log.warning("epoch=%d could not be ended at the trainer: %s", group.epoch, error)

    async def _form(self, decision: Form, seen: Observation) -> None:
        if (
            self._standing.transfer_deadline is not None
            and asyncio.get_running_loop().time() < self._standing.transfer_deadline
        ):
            return  # an update began while this round was observing
        group = decision.group
        log.info(
            "epoch=%d members=%s forming: %s",
            group.epoch,
            ",".join(group.names) or "none",
            decision.reason,
        )
        self.waiting_for = f"generators to join epoch {group.epoch}"
        self._standing.epoch_floor = group.epoch
        self._forming, self._standing.group, self._standing.transfer_deadline = True, None, None
        # A restarted trainer may train another model.
        self._manifest = None
        try:
            clients = {name: self._observer.client(name) for name in group.names}
            failure = await form_group(group, self._trainer, clients, self._settings)
        finally:
            self._forming = False
        if failure is not None:
            self.counters.form_failures += 1
            log.warning("epoch=%d did not form: %s", group.epoch, failure.reason)
            self._leave_out(failure.culprits)
            if not failure.culprits:
                self._standing.not_before = asyncio.get_running_loop().time() + RETRY_S
            self.wake()
            return
        self.counters.groups_formed += 1
        self._standing.group, self._clients = group, clients
        self.waiting_for = "every ready generator is a member"
        self._served = {
            each.name: each.served_version for each in seen.generators if each.name in group.names
        }
        log.info("epoch=%d world_size=%d formed", group.epoch, group.world_size)

    def _leave_out(self, culprits: Mapping[str, str]) -> None:
        now = asyncio.get_running_loop().time()
        for name, reason in culprits.items():
            self.counters.expulsions += 1
            delay = self._backoff.failed(name, now)
            log.warning("generator=%s left out for %g s: %s", name, delay, reason)
