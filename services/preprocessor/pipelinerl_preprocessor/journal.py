"""The journal: the ledger's records as JSON, durable in a key-value bucket.

Keys    "ledger", and "group.<slot>" per outstanding group. Slots are reused, so the bucket never
        outgrows the largest number of groups that were ever outstanding at once.
Order   groups, then the ledger, then deletions. `Ledger.recover` repairs a crash between any two
        writes: groups beyond the cursor advance it; groups of the last commit or of an older
        incarnation are ignored.
"""

import asyncio
import heapq
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

from pipelinerl_common.errors import FatalError, TemporaryError, Unavailable
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import Group, LedgerState
from pipelinerl_preprocessor.ledger import Ledger

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
LEDGER_KEY = "ledger"
GROUP_PREFIX = "group."
_RETRY_S = 0.5
_WRITES_AT_ONCE = 64

Write: TypeAlias = tuple[str, bytes | None]
"""Key and value; None deletes."""


def encode_ledger(state: LedgerState) -> bytes:
    return _encode(asdict(state))


def decode_ledger(key: str, payload: bytes) -> LedgerState:
    with _decoding(key, payload) as fields:
        return LedgerState(**{**fields, "last_commit": tuple(fields["last_commit"])})


def encode_group(group: Group) -> bytes:
    """The fields that recovery needs: leases are renewed and messages redelivered."""
    return _encode(
        {
            "group_id": group.group_id,
            "sequence": group.sequence,
            "prompt_index": group.prompt_index,
            "attempt": group.attempt,
            "actor_id": group.actor_id,
            "session_id": group.session_id,
            "started_version": group.started_version,
            **({"traceparent": group.traceparent} if group.traceparent else {}),
        }
    )


def decode_group(key: str, payload: bytes) -> Group:
    with _decoding(key, payload) as fields:
        return Group(**{**fields, "group_id": GroupId(fields["group_id"])})


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema_version": SCHEMA_VERSION, **fields}, separators=(",", ":")).encode()


@contextmanager
def _decoding(key: str, payload: bytes) -> Iterator[dict[str, Any]]:
    """Raises FatalError that names the key when the record cannot be read."""
    try:
        fields = json.loads(payload)
        if not isinstance(fields, dict) or fields.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is not {SCHEMA_VERSION}")
        yield fields
    except (ValueError, TypeError, KeyError) as error:
        raise FatalError(
            f"journal record {key!r} cannot be read ({error}): it was written by another release "
            "or damaged; delete the job's journal bucket and let the trainer restore from its "
            "checkpoint"
        ) from error


class JournalStore(Protocol):
    """The methods that are used of `pipelinerl_common.stream.Journal`."""

    async def put(self, key: str, value: bytes) -> None: ...
    async def delete(self, key: str) -> None: ...
    async def entries(self) -> dict[str, bytes]: ...


class JournalWriter:
    """The writer of the ledger's changes: one write at a time, many changes in each."""

    def __init__(self, bucket: JournalStore, ledger: Ledger) -> None:
        self._bucket = bucket
        self._ledger = ledger
        self._changed: set[GroupId | None] = set()
        self._num_marked = 0
        self._num_written = 0
        self._marked = asyncio.Event()
        self._written = asyncio.Condition()
        self._slots: dict[GroupId, int] = {}
        self._free_slots: list[int] = []
        self._next_slot = itertools.count()
        ledger.on_change = self._mark

    async def recover(self, now: float) -> None:
        """Restores the ledger's state from the journal; a bucket without a ledger record leaves it
        unrestored.
        """
        entries = await self._bucket.entries()
        groups: list[Group] = []
        for key in sorted((key for key in entries if key.startswith(GROUP_PREFIX)), key=_slot_of):
            group = decode_group(key, entries[key])
            groups.append(group)
            self._slots[group.group_id] = _slot_of(key)
        used = set(self._slots.values())
        self._next_slot = itertools.count(max(used, default=-1) + 1)
        self._free_slots = sorted(set(range(max(used, default=0))) - used)
        if LEDGER_KEY in entries:
            self._ledger.recover(decode_ledger(LEDGER_KEY, entries[LEDGER_KEY]), groups, now)
        for group in groups:
            if self._ledger.groups.get(group.group_id) is None:
                self._mark(group.group_id)

    async def run(self) -> None:
        """Writes the records that have changed, until cancelled.

        Consumes the groups that `Ledger.on_change` names, produces writes to the bucket; waits for
        a change, and for the store while it is unreachable.
        """
        while True:
            await self._marked.wait()
            self._marked.clear()
            changed, self._changed = self._changed, set()
            # Counted before the write: what is marked during it belongs to the next one.
            marked = self._num_marked
            await self._write(changed)
            async with self._written:
                self._num_written = marked
                self._written.notify_all()

    async def sync(self, timeout_s: float = 10.0) -> None:
        """Returns when everything that has changed until now is durable. Raises Unavailable at the
        deadline.
        """
        target = self._num_marked
        try:
            async with asyncio.timeout(timeout_s), self._written:
                await self._written.wait_for(lambda: self._num_written >= target)
        except TimeoutError as error:
            raise Unavailable(f"the journal could not be written within {timeout_s:g} s") from error

    def _mark(self, group_id: GroupId | None) -> None:
        self._changed.add(group_id)
        self._num_marked += 1
        self._marked.set()

    async def _write(self, changed: set[GroupId | None]) -> None:
        """Writes the records of `changed` as they are now."""
        # All are encoded before the first await, so that the records fit together.
        groups: list[Write] = []
        ended: list[GroupId] = []
        for group_id in changed:
            group = None if group_id is None else self._ledger.groups.get(group_id)
            if group is not None:
                groups.append((f"{GROUP_PREFIX}{self._slot(group.group_id)}", encode_group(group)))
            elif group_id in self._slots:
                ended.append(group_id)
        ledger: list[Write] = (
            [(LEDGER_KEY, encode_ledger(self._ledger.state))] if self._ledger.restored else []
        )
        await self._apply(groups)
        await self._apply(ledger)
        await self._apply([(f"{GROUP_PREFIX}{self._slots[group_id]}", None) for group_id in ended])
        for group_id in ended:
            heapq.heappush(self._free_slots, self._slots.pop(group_id))

    def _slot(self, group_id: GroupId) -> int:
        if group_id not in self._slots:
            self._slots[group_id] = (
                heapq.heappop(self._free_slots) if self._free_slots else next(self._next_slot)
            )
        return self._slots[group_id]

    async def _apply(self, writes: Sequence[Write]) -> None:
        for start in range(0, len(writes), _WRITES_AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for key, value in writes[start : start + _WRITES_AT_ONCE]:
                    tasks.create_task(self._apply_one(key, value))

    async def _apply_one(self, key: str, value: bytes | None) -> None:
        """Retries until the store is reachable."""
        while True:
            try:
                return await (
                    self._bucket.delete(key) if value is None else self._bucket.put(key, value)
                )
            except TemporaryError as error:
                # Without a deadline: the callers that need the write have one, in `sync`.
                log.warning("journal key=%s not written, retrying: %s", key, error)
                await asyncio.sleep(_RETRY_S)


def _slot_of(key: str) -> int:
    try:
        return int(key.removeprefix(GROUP_PREFIX))
    except ValueError as error:
        raise FatalError(
            f"journal key {key!r} is not a group's slot: delete the job's journal bucket"
        ) from error
