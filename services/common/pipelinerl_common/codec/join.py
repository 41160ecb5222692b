"""Joins the parts of groups that were too large for one message."""

from collections.abc import Callable
from typing import NamedTuple

from pipelinerl_common.codec.group import GroupPart, whole
from pipelinerl_common.errors import MalformedMessage
from pipelinerl_common.types import SampleGroup


class PartKey(NamedTuple):
    """What the parts of one group have in common."""

    group_id: str
    attempt: int


class GroupJoiner:
    """Collects parts until their group is whole. Groups of one part pass straight through.

    Bounded: beyond `max_groups` incomplete groups or `max_tokens` in them the oldest is evicted, as
    is an attempt when a part of a newer one arrives (its actor is gone). `num_evicted` counts them,
    `on_evict` gets what is lost.
    """

    def __init__(
        self,
        max_groups: int = 1024,
        max_tokens: int = 1 << 25,
        on_evict: Callable[[PartKey, list[GroupPart]], None] | None = None,
    ) -> None:
        self._max_groups = max_groups
        self._max_tokens = max_tokens
        self._on_evict = on_evict
        self._waiting: dict[PartKey, dict[int, GroupPart]] = {}
        self._num_tokens = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        """Incomplete groups."""
        return len(self._waiting)

    def add(self, part: GroupPart) -> SampleGroup | None:
        """The whole group when this was its last missing part. A part that is already there
        replaces itself.

        Raises MalformedMessage when the part contradicts those before it; the incomplete group
        stays as it was. So it does when all parts are there and make no group, but then those
        before it are evicted.
        """
        if part.num_parts == 1:
            return whole(part.header, part.header.samples)
        key = PartKey(part.header.group_id, part.header.attempt)
        for older in [
            each
            for each in self._waiting
            if each.group_id == key.group_id and each.attempt < key.attempt
        ]:
            self._evict(older)
        parts = self._waiting.setdefault(key, {})
        if parts:
            _check_agreement(part, next(iter(parts.values())))
        replaced = parts.pop(part.part, None)
        self._num_tokens -= 0 if replaced is None else _num_tokens(replaced)
        if len(parts) + 1 == part.num_parts:
            return self._joined(key, part)
        parts[part.part] = part
        self._num_tokens += _num_tokens(part)
        self._make_room(key)
        return None

    def _joined(self, key: PartKey, last: GroupPart) -> SampleGroup:
        parts = {**self._waiting[key], last.part: last}
        samples = [
            sample for number in range(last.num_parts) for sample in parts[number].header.samples
        ]
        total = last.num_samples
        try:
            if len(samples) != total:
                raise MalformedMessage(
                    f"group {key.group_id}: {len(samples)} samples, num_samples={total}",
                    "num_samples",
                )
            group = whole(last.header, samples)
        except MalformedMessage:
            self._evict(key)
            raise
        self.discard(key)
        return group

    def discard(self, key: PartKey) -> list[GroupPart]:
        """Forgets an incomplete group, if it is there, and returns its parts."""
        parts = list(self._waiting.pop(key, {}).values())
        self._num_tokens -= sum(_num_tokens(part) for part in parts)
        return parts

    def _make_room(self, newest: PartKey) -> None:
        while len(self._waiting) > self._max_groups or self._num_tokens > self._max_tokens:
            oldest = next(iter(self._waiting))
            if oldest == newest:
                return
            self._evict(oldest)

    def _evict(self, key: PartKey) -> None:
        parts = self.discard(key)
        self.num_evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, parts)


def _check_agreement(part: GroupPart, other: GroupPart) -> None:
    def facts(each: GroupPart) -> tuple[object, ...]:
        header = each.header
        return header.job, header.prompt_index, header.temperature, each.num_parts, each.num_samples

    if facts(part) != facts(other):
        raise MalformedMessage(
            f"group {part.header.group_id}: parts {part.part} and {other.part} disagree on (job, "
            "prompt_index, temperature, "
            f"num_parts, num_samples): {facts(part)} and {facts(other)}",
            "parts",
        )


def _num_tokens(part: GroupPart) -> int:
    return sum(len(sample.token_ids_S) for sample in part.header.samples)
