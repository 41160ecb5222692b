"""The order of an in-flight weight update, and what happens when it goes wrong.

```
 staged                                    inplace
 ------                                    -------
 check epoch, version, manifest            check epoch, version, manifest
 stage       (decoding continues)          back up     (decoding continues)
 pause                                     pause
   apply, set version                        receive, set version  |  on failure: roll back
 resume                                    resume
```
A failure before `apply` leaves the old weights as they are; a failed in-place receive rolls back to
them. A later failure leaves the weights undefined: the process ends (FatalError) and is restarted.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipelinerl_actor.generator.engine import (
    GeneratorEngine,
    KVCache,
    Received,
    Transfer,
)
from pipelinerl_actor.generator.metrics import GeneratorMetrics
from pipelinerl_actor.generator.weight_layout import ExpectedWeights, ManifestMismatch
from pipelinerl_common.errors import FatalError, Refused
from pipelinerl_common.generator_api import InitGroupRequest, UnknownManifest, UpdateResponse
from pipelinerl_common.telemetry import fields
from pipelinerl_weights.manifest import Manifest

log = logging.getLogger(__name__)

NOTHING_RECEIVED = -1
NO_GROUP = 0


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A parsed request for an update."""

    epoch: int
    transfer: Transfer
    mode: str
    kv_cache: KVCache
    allow_rollback: bool


class WeightUpdater:
    """Owns the generator's weights: their version, their group, and the one running update."""

    def __init__(
        self,
        engine: GeneratorEngine,
        layout: ExpectedWeights | None,
        metrics: GeneratorMetrics,
        *,
        initial_version: int,
        running: Callable[[], int],
    ) -> None:
        """`layout` is what updates bring; None for a generator that takes none."""
        self._engine = engine
        self._layout = layout
        self._metrics = metrics
        self._running = running
        # A change of the group and an update exclude each other: an update belongs to one group.
        self._lock = asyncio.Lock()
        self.version = initial_version
        self.checksum: str | None = None
        self.epoch = NO_GROUP
        self._manifest: Manifest | None = None
        """The manifest of the present group's updates, once one has carried it."""
        self.num_updates = 0
        self.num_failures = 0
        self._publish()

    async def join(self, group: InitGroupRequest) -> list[int]:
        """Joins the group of a newer epoch. An update that still runs in the old one fails.

        Raises Refused for an epoch that is not newer, or where no updates are taken;
        TransferTimeout, TransferAborted or TransferFailed when it does not form.
        """
        self._expected()
        if group.epoch <= self.epoch:
            raise Refused(
                f"epoch {group.epoch} is not newer than {self.epoch}, in which this generator is a "
                "member"
            )
        # Before the lock: the running update holds it, and waits for a group that is gone.
        await self._engine.leave()
        async with self._lock:
            self.epoch, self._manifest = NO_GROUP, None
            try:
                ranks = await self._engine.join(group)
                self.epoch = group.epoch
            finally:
                self._publish()
        log.info(fields(epoch=group.epoch, ranks=ranks, world_size=group.world_size))
        return ranks

    def known_manifest(self, manifest_hash: str | None) -> Manifest:
        """The manifest that an earlier update of the present group carried. Raises UnknownManifest,
        so that the caller sends it again.
        """
        if self._manifest is None or self._manifest.hash != manifest_hash:
            raise UnknownManifest(
                f"manifest {manifest_hash} is unknown in epoch {self.epoch}; send it in full"
            )
        return self._manifest

    async def update(self, update: WeightUpdate) -> UpdateResponse:
        """Raises Refused or ManifestMismatch before anything changed; TransferTimeout,
        TransferAborted or TransferFailed with the old weights still in service; FatalError when the
        weights cannot be trusted any more.
        """
        try:
            self._check(update)
            async with self._lock:
                # Again: the epoch may have changed while the lock was awaited.
                self._check_order(update)
                report = await self._run(update)
        except Exception as error:
            self.num_failures += 1
            self._metrics.update_errors.inc(reason=type(error).__name__)
            log.warning(
                "%s",
                fields(update=update.transfer.version, epoch=update.epoch, serving=self.version),
                exc_info=error,
            )
            raise
        self.num_updates += 1
        self._metrics.updates.inc(mode=update.mode)
        self._metrics.pause.observe(report.pause_s, mode=update.mode)
        self._metrics.transfer.observe(report.transfer_s, mode=update.mode)
        log.info(
            fields(
                update=report.version,
                mode=update.mode,
                checksum=report.checksum,
                pause_s=report.pause_s,
                transfer_s=report.transfer_s,
                apply_s=report.apply_s,
                running=report.num_running,
            )
        )
        return report

    def _check(self, update: WeightUpdate) -> None:
        expected = self._expected()
        if self._lock.locked():
            raise Refused("an update is running")
        if update.mode == "staged" and not self._engine.can_stage:
            raise ManifestMismatch(
                "mode=staged needs memory for a second copy, but this generator was started with "
                "mode=inplace"
            )
        expected.check(update.transfer.manifest)
        self._check_order(update)
        self._manifest = update.transfer.manifest

    def _expected(self) -> ExpectedWeights:
        if self._layout is None:
            raise Refused(
                "this generator keeps the weights that it started with: it is the reference's or "
                "an evaluator's"
            )
        return self._layout

    def _check_order(self, update: WeightUpdate) -> None:
        if update.epoch != self.epoch:
            known = f"a member in epoch {self.epoch}" if self.epoch else "a member of no group"
            raise Refused(f"epoch {update.epoch} is not current: this generator is {known}")
        if update.transfer.version < self.version and not update.allow_rollback:
            raise Refused(
                f"version {update.transfer.version} is older than {self.version}; set "
                "allow_rollback to go back"
            )

    async def _run(self, update: WeightUpdate) -> UpdateResponse:
        try:
            if update.mode == "staged":
                return await self._staged(update)
            return await self._in_place(update)
        except FatalError:
            raise
        except Exception:
            # The other members fail too, or wait for this one: no update can use this group again.
            self.epoch = NO_GROUP
            await self._engine.leave()
            raise
        finally:
            self._publish()

    async def _staged(self, update: WeightUpdate) -> UpdateResponse:
        received = await self._engine.stage(update.transfer)
        async with self._paused(update) as pause:
            start = time.monotonic()
            await self._engine.apply()
            apply_s = received.load_s + time.monotonic() - start
            await self._commit(update, received)
        return self._report(update, received, pause, apply_s)

    async def _in_place(self, update: WeightUpdate) -> UpdateResponse:
        await self._engine.back_up()
        async with self._paused(update) as pause:
            try:
                received = await self._engine.receive_in_place(update.transfer)
            except FatalError:
                raise
            except Exception as error:
                log.warning("rolling back to version=%d", self.version, exc_info=error)
                await self._engine.roll_back()
                pause.survivable = error
            else:
                await self._commit(update, received)
        if pause.survivable is not None:
            raise pause.survivable
        return self._report(update, received, pause, received.load_s)

    @asynccontextmanager
    async def _paused(self, update: WeightUpdate) -> AsyncIterator["_Pause"]:
        """Pauses the engine for the block. Any error in it is fatal: the weights may be a mixture
        of two versions.
        """
        pause = _Pause(self._running())
        start = time.monotonic()
        try:
            await self._engine.pause(update.kv_cache)
            yield pause
            await self._engine.resume()
        except FatalError:
            raise
        except Exception as error:
            raise FatalError(
                f"the weights are undefined after a failed update to {update.transfer.version}: "
                f"{error}"
            ) from error
        pause.seconds = time.monotonic() - start

    async def _commit(self, update: WeightUpdate, received: Received) -> None:
        await self._engine.set_version(update.transfer.version)
        self.version, self.checksum = update.transfer.version, received.checksum

    def _report(
        self, update: WeightUpdate, received: Received, pause: "_Pause", apply_s: float
    ) -> UpdateResponse:
        return UpdateResponse(
            version=update.transfer.version,
            checksum=received.checksum,
            pause_s=pause.seconds,
            transfer_s=received.transfer_s,
            apply_s=apply_s,
            num_running=pause.num_running,
        )

    def _publish(self) -> None:
        self._metrics.version.set(self.version)
        self._metrics.epoch.set(self.epoch)


@dataclass(slots=True)
class _Pause:
    """What happened while the engine was paused."""

    num_running: int
    seconds: float = 0.0
    survivable: Exception | None = None
    """The error of an update that was rolled back."""
