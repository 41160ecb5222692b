"""What the members of a group agree on through its store: the slice plan, made once for a group
and a manifest (its hash is in the keys), and for each transfer its version, its beginning and its
checksum.

    holds/<hash>/<rank>      the blocks that a trainer rank sends
    needs/<hash>/<rank>      the blocks that a worker loads
    part/<hash>/<rank>       the rank's part of the plan
    proposal/<k>             the version that rank 0 wants to send next
    answer/<k>/<rank>        whether a trainer rank still has that version
    decision/<k>             whether all of them do
    begin/<n>                every rank is ready for the n-th transfer
    sums/<n>/<rank>          the checksums of the chunks that the rank sent first
    checksum/<n>             the checksum of the version
"""

import json
import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipelinerl_weights.checksum import checksum_text, fold_checksums
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.plan import PlanPart, make_plan
from pipelinerl_weights.slices import Block, check_blocks, whole_tensors

log = logging.getLogger(__name__)

_PROPOSAL_POLL_S = 0.1
_EVERYTHING = b"everything"
"""Stands for the blocks of a rank that needs all of every tensor."""


def post_blocks(
    group: TransferGroup, kind: str, manifest: Manifest, blocks: Sequence[Block]
) -> None:
    """Reports to rank 0 what this rank `holds` or `needs`, once for a manifest."""
    if manifest.hash not in group.parts:
        is_all = tuple(blocks) == whole_tensors(manifest)
        key = _key(kind, manifest, group.rank)
        group.post(key, _EVERYTHING if is_all else _packed(blocks))


def _key(kind: str, manifest: Manifest, rank: int | None = None) -> str:
    return f"{kind}/{manifest.hash[:16]}" + ("" if rank is None else f"/{rank}")


def _blocks(group: TransferGroup, kind: str, rank: int, manifest: Manifest) -> tuple[Block, ...]:
    value = group.read(_key(kind, manifest, rank))
    if value == _EVERYTHING:
        return whole_tensors(manifest)
    blocks = tuple(
        Block(index, tuple(start), tuple(size)) for index, start, size in _unpacked(value)
    )
    check_blocks(manifest, blocks)
    return blocks


def distribute_plan(group: TransferGroup, manifest: Manifest, deadline: float) -> None:
    """Makes the plan on rank 0 in the first transfer of a manifest, when every rank has posted
    what it holds or needs, and posts each rank's part.
    """
    if manifest.hash in group.parts:
        return
    senders, ranks = range(group.num_senders), range(group.world_size)
    receivers = ranks[group.num_senders :]
    group.wait_for_ranks(_key("holds", manifest), senders, deadline, "say what it holds")
    group.wait_for_ranks(_key("needs", manifest), receivers, deadline, "say what it needs")
    began = time.monotonic()
    plan = make_plan(
        manifest,
        {rank: _blocks(group, "holds", rank, manifest) for rank in senders},
        {rank: _blocks(group, "needs", rank, manifest) for rank in receivers},
        {rank: group.read(f"joined/{rank}").decode() for rank in ranks},
    )
    for rank, part in enumerate(plan.parts(group.world_size)):
        group.post(_key("part", manifest, rank), _packed(part.to_json()))
    log.info(
        "slice plan: %d chunks of at most %d bytes in %d rounds, made in %.2f s",
        len(plan.chunks),
        max((chunk.num_bytes for chunk in plan.chunks), default=0),
        len(plan.rounds),
        time.monotonic() - began,
    )


def begin(group: TransferGroup) -> None:
    """Lets every rank begin the transfer that rank 0 is in."""
    group.post(f"begin/{group.num_transfers}", b"1")


def wait_to_begin(group: TransferGroup, deadline: float) -> None:
    """Waits until all ranks are ready, so that nothing waits on a device for one that is not."""
    group.wait_for(f"begin/{group.num_transfers}", deadline, "the transfer's beginning")


def own_part(group: TransferGroup, manifest: Manifest) -> PlanPart:
    """Returns this rank's part of the plan, which the store has once a transfer began."""
    if manifest.hash not in group.parts:
        document = _unpacked(group.read(_key("part", manifest, group.rank)))
        group.parts[manifest.hash] = PlanPart.from_json(manifest, document)
    return group.parts[manifest.hash]


# The checksums of a transfer


def post_sums(group: TransferGroup, sums: Mapping[int, Tensor]) -> None:
    """Posts the checksums of the chunks that this rank sent first."""
    own = {str(chunk): checksum_text(value) for chunk, value in sums.items()}
    group.post(f"sums/{group.num_transfers}/{group.rank}", _packed(own))


def fold_sums(group: TransferGroup, deadline: float) -> str:
    """Returns the version's checksum, on rank 0, from those of all chunks, and posts it."""
    key = f"sums/{group.num_transfers}"
    group.wait_for_ranks(key, range(group.num_senders), deadline, "end its part")
    sums: dict[int, str] = {}
    for rank in range(group.num_senders):
        own = _unpacked(group.read(f"{key}/{rank}"))
        sums |= {int(chunk): value for chunk, value in own.items()}
    checksum = fold_checksums([sums[chunk] for chunk in sorted(sums)])
    group.post(f"checksum/{group.num_transfers}", checksum)
    return checksum


def check_sums(
    group: TransferGroup,
    manifest: Manifest,
    part: PlanPart,
    sums: Mapping[int, Tensor],
    deadline: float,
) -> str:
    """Compares what this rank received with what was sent and returns the version's checksum.
    Raises TransferFailed, and the group is then aborted for every member.
    """
    key = f"sums/{group.num_transfers}"
    origins = sorted({part.origins[chunk] for chunk in sums})
    group.wait_for_ranks(key, origins, deadline, "end its part")
    for origin in origins:
        sent: dict[str, str] = _unpacked(group.read(f"{key}/{origin}"))
        for chunk, value in sums.items():
            if part.origins[chunk] == origin and checksum_text(value) != sent[str(chunk)]:
                first = manifest.tensors[part.chunks[chunk].blocks[0].tensor].name
                group.fail(
                    TransferFailed(
                        f"rank {group.rank} received other bytes than rank {origin} sent, "
                        f"in the chunk that begins with {first}"
                    )
                )
    what = "the version's checksum"
    return group.wait_for(f"checksum/{group.num_transfers}", deadline, what).decode()


# Which version the trainer's ranks send


def propose(group: TransferGroup, version: int, timeout_s: float) -> bool:
    """Returns, on rank 0, whether every rank of the trainer still has `version`; if so all of them
    take part in the next transfer. Raises as `Pending.wait` does.
    """
    group.num_proposals += 1
    proposal, others = group.num_proposals, range(1, group.num_senders)
    group.post(f"proposal/{proposal}", str(version))
    key = f"answer/{proposal}"
    deadline = time.monotonic() + timeout_s
    group.wait_for_ranks(key, others, deadline, "answer which version it has")
    agreed = all(group.read(f"{key}/{rank}") == b"yes" for rank in others)
    group.post(f"decision/{proposal}", b"yes" if agreed else b"no")
    return agreed


def next_proposal(group: TransferGroup) -> int:
    """Waits, on another rank of the trainer, until rank 0 proposes a version, as long as the group
    lives.
    """
    group.num_proposals += 1
    # Seldom: all ranks ask the one store, and most of a step there is nothing to send.
    poll_s = _PROPOSAL_POLL_S
    key = f"proposal/{group.num_proposals}"
    return int(group.wait_for(key, float("inf"), "a proposal", poll_s))


def answer(group: TransferGroup, *, has_it: bool, timeout_s: float) -> bool:
    """Answers rank 0's proposal and returns what it decided."""
    key, deadline = f"decision/{group.num_proposals}", time.monotonic() + timeout_s
    group.post(f"answer/{group.num_proposals}/{group.rank}", b"yes" if has_it else b"no")
    return group.wait_for(key, deadline, "rank 0's decision") == b"yes"


def _packed(document: Any) -> bytes:
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)


def _unpacked(value: bytes) -> Any:
    return json.loads(zlib.decompress(value))
