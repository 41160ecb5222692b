"""The slice plan: which rank sends which blocks to whom, in which order. Pure and deterministic.

    holdings of the trainer's ranks --+
    needs of the generators' workers -+-> pieces -> chunks -> hops -> rounds, one part for each rank
    the host of every rank -----------+

**Pieces.** The needs of one tensor are cut into cells that have one set of receivers each, and the
cells along the holdings' edges. A piece that several ranks hold is sent by the one that has least
to send.

**Chunks.** Pieces with the same sender and receivers travel together in one buffer.

**Hops.** A chunk enters each host once, at the worker that has received least, which hands it to
its neighbours on the host over the host's own links. With as many sending hosts as receiving ones
every host is sent to directly; with fewer, a chain passes through several hosts, so that a sender's
link carries about as many bytes as a receiver's, whatever the number of generators:

    trainer host 0 --> generator host 0 --> host 2 --> host 4        each link carries
    trainer host 1 --> generator host 1 --> host 3 --> host 5        about one model

A rank that forwards a chunk needs it itself. Chains follow one order of the hosts, so waiting for
room in a buffer cannot form a circle.

**Rounds.** In a round every rank sends at most one chunk and receives at most one. All ranks walk
the rounds in the same order and post both as one group, so no order of peers can deadlock. Senders
begin with different receivers (a Latin square), so no receiver is idle while another is flooded.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipelinerl_common.errors import MalformedMessage, PermanentError
from pipelinerl_weights.manifest import ALIGNMENT, ITEM_BYTES, Manifest
from pipelinerl_weights.slices import Block, are_disjoint, cells, contains, intersection, split

CHUNKS_PER_SENDER = 16
"""A small model is sent in at least this many chunks a sender, so that the shares are even."""
MIN_CHUNK_BYTES = 1 << 16
HELD_CHUNKS = 4
"""Chunks that a rank may hold for forwarding at a time."""


class Hop(NamedTuple):
    """One chunk on its way from one rank to the next."""

    chunk: int
    peer: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks that travel in one buffer, one behind the other."""

    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]
    """Bytes from the buffer's start, multiples of ALIGNMENT."""
    num_bytes: int
    """Padding included; a multiple of ALIGNMENT."""

    @classmethod
    def of(cls, manifest: Manifest, blocks: Sequence[Block]) -> "Chunk":
        offsets: list[int] = []
        end = 0
        for block in blocks:
            offsets.append(end)
            end += padded_bytes(manifest, block)
        return cls(tuple(blocks), tuple(offsets), end)


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank exchanges in one round, posted as one group."""

    sends: tuple[Hop, ...] = ()
    receives: tuple[Hop, ...] = ()


@dataclass(frozen=True)
class PlanPart:
    """One rank's part of a plan."""

    chunks: Mapping[int, Chunk]
    """The chunks that pass through this rank, by their number in the plan."""
    origins: Mapping[int, int]
    """The rank that each of those chunks comes from at first."""
    rounds: tuple[Round, ...]
    """The rounds in which this rank takes part, in order."""

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return max((chunk.num_bytes for chunk in self.chunks.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        """Returns the form that travels through the group's store."""
        return {
            "chunks": [
                [number, self.origins[number], [[*block] for block in chunk.blocks]]
                for number, chunk in self.chunks.items()
            ],
            "rounds": [[each.sends, each.receives] for each in self.rounds],
        }

    @classmethod
    def from_json(cls, manifest: Manifest, document: Mapping[str, Any]) -> "PlanPart":
        """Raises MalformedMessage."""
        try:
            chunks: dict[int, Chunk] = {}
            origins: dict[int, int] = {}
            for number, origin, blocks in document["chunks"]:
                parsed = [Block(index, tuple(start), tuple(size)) for index, start, size in blocks]
                chunks[number], origins[number] = Chunk.of(manifest, parsed), origin
            rounds = tuple(
                Round(tuple(Hop(*hop) for hop in sends), tuple(Hop(*hop) for hop in receives))
                for sends, receives in document["rounds"]
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise MalformedMessage(f"not a part of a slice plan: {error!r}") from error
        return cls(chunks, origins, rounds)


@dataclass(frozen=True)
class SlicePlan:
    """The whole plan of one set of receivers."""

    chunks: tuple[Chunk, ...]
    origins: tuple[int, ...]
    """The trainer rank that sends each chunk first."""
    rounds: tuple[tuple[tuple[int, int, int], ...], ...]
    """Each round's hops: chunk, sender, receiver."""

    def part(self, rank: int) -> PlanPart:
        """Returns what `rank` does."""
        rounds: list[Round] = []
        numbers: dict[int, None] = {}
        for hops in self.rounds:
            sends = tuple(Hop(chunk, to) for chunk, source, to in hops if source == rank)
            receives = tuple(Hop(chunk, source) for chunk, source, to in hops if to == rank)
            if sends or receives:
                rounds.append(Round(sends, receives))
                numbers.update(dict.fromkeys(hop.chunk for hop in (*sends, *receives)))
        return PlanPart(
            {number: self.chunks[number] for number in numbers},
            {number: self.origins[number] for number in numbers},
            tuple(rounds),
        )

    def parts(self, world_size: int) -> list[PlanPart]:
        """Returns the parts of all ranks, in one walk over the rounds."""
        rounds: list[list[Round]] = [[] for _ in range(world_size)]
        numbers: list[dict[int, None]] = [{} for _ in range(world_size)]
        for hops in self.rounds:
            now: dict[int, tuple[list[Hop], list[Hop]]] = defaultdict(lambda: ([], []))
            for chunk, source, to in hops:
                now[source][0].append(Hop(chunk, to))
                now[to][1].append(Hop(chunk, source))
                numbers[source][chunk] = numbers[to][chunk] = None
            for rank, (sends, receives) in now.items():
                rounds[rank].append(Round(tuple(sends), tuple(receives)))
        return [
            PlanPart(
                {number: self.chunks[number] for number in numbers[rank]},
                {number: self.origins[number] for number in numbers[rank]},
                tuple(rounds[rank]),
            )
            for rank in range(world_size)
        ]

    def traffic(self) -> Iterator[tuple[int, int, int]]:
        """Yields sender, receiver and bytes of every hop."""
        for hops in self.rounds:
            for chunk, source, to in hops:
                yield source, to, self.chunks[chunk].num_bytes


def make_plan(
    manifest: Manifest,
    holdings: Mapping[int, Sequence[Block]],
    needs: Mapping[int, Sequence[Block]],
    hosts: Mapping[int, str],
) -> SlicePlan:
    """Returns the plan by which the ranks of `holdings` send every rank of `needs` what it needs.

    `hosts` has the host of every rank; ranks of one host reach each other without the network.
    Buffers have at most the manifest's `bucket_bytes`, or one row of a tensor when that is larger.
    Raises PermanentError that names a tensor of which no rank holds what is needed.
    """
    pieces = _Pieces(manifest, holdings, needs)
    total = sum(padded_bytes(manifest, piece) for piece, _, _ in pieces)
    most = max(MIN_CHUNK_BYTES, total // max(1, CHUNKS_PER_SENDER * len(holdings)))
    chunks = _chunks(manifest, pieces, min(most, manifest.bucket_bytes))
    routes = _Routes(hosts, {source for source, _, _ in chunks})
    return SlicePlan(
        tuple(chunk for _, _, chunk in chunks),
        tuple(source for source, _, _ in chunks),
        tuple(_Schedule(hosts, [routes.tree(*each) for each in chunks]).rounds()),
    )


def padded_bytes(manifest: Manifest, block: Block) -> int:
    """Bytes of `block` in a chunk."""
    size = block.num_items * ITEM_BYTES[manifest.tensors[block.tensor].dtype]
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pieces:
    """Iterates over pieces in the manifest's order: block, the ranks that hold it, and the ranks
    that need it.
    """

    def __init__(
        self,
        manifest: Manifest,
        holdings: Mapping[int, Sequence[Block]],
        needs: Mapping[int, Sequence[Block]],
    ) -> None:
        self._manifest = manifest
        self._held = _by_tensor(holdings)
        self._needed = _by_tensor(needs)

    def __iter__(self) -> Iterator[tuple[Block, tuple[int, ...], tuple[int, ...]]]:
        for tensor in sorted(self._needed):
            needed, held = self._needed[tensor], self._held.get(tensor, {})
            for cell in cells(needed):
                receivers = _who(needed, cell)
                parts = _parts(held, cell)
                if sum(part.num_items for part in parts) != cell.num_items:
                    name = self._manifest.tensors[tensor].name
                    raise PermanentError(f"{name}: no trainer rank holds all that generators need")
                for part, holders in parts.items():
                    yield part, holders, receivers


def _by_tensor(ranks: Mapping[int, Sequence[Block]]) -> dict[int, dict[Block, list[int]]]:
    """Returns each tensor's distinct blocks with the ranks that have them. Ranks with equal lists
    are walked once, since a job has many workers and few kinds of slices.
    """
    alike: dict[tuple[Block, ...], list[int]] = {}
    for rank in sorted(ranks):
        alike.setdefault(tuple(ranks[rank]), []).append(rank)
    found: dict[int, dict[Block, list[int]]] = defaultdict(dict)
    for blocks, members in alike.items():
        for block in dict.fromkeys(blocks):
            found[block.tensor].setdefault(block, []).extend(members)
    return found


def _parts(held: Mapping[Block, list[int]], cell: Block) -> dict[Block, tuple[int, ...]]:
    """Cuts what is held of `cell` into disjoint parts, each with the ranks that hold it."""
    found = [
        (part, tuple(ranks))
        for block, ranks in held.items()
        if (part := intersection(block, cell)) is not None
    ]
    parts = [part for part, _ in found]
    # Partitions are disjoint; a grid over the edges of many would be very fine.
    if are_disjoint(parts):
        return dict(found)
    return {part: _who(held, part) for part in cells(parts)}


def _who(blocks: Mapping[Block, list[int]], cell: Block) -> tuple[int, ...]:
    """Returns the ranks whose blocks contain `cell`."""
    if len(blocks) == 1:
        return tuple(next(iter(blocks.values())))
    return tuple(
        sorted({rank for block, ranks in blocks.items() if contains(block, cell) for rank in ranks})
    )


def _chunks(
    manifest: Manifest, pieces: _Pieces, most_bytes: int
) -> list[tuple[int, tuple[int, ...], Chunk]]:
    """Returns sender, receivers and blocks of every chunk, in the manifest's order as far as one
    sender's chunks go.
    """
    load: dict[int, int] = defaultdict(int)
    open_: dict[tuple[int, tuple[int, ...]], list[Block]] = {}
    filled: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    done: list[tuple[int, tuple[int, ...], Chunk]] = []

    def close(key: tuple[int, tuple[int, ...]]) -> None:
        done.append((*key, Chunk.of(manifest, open_.pop(key))))
        filled[key] = 0

    for piece, holders, receivers in pieces:
        item_bytes = ITEM_BYTES[manifest.tensors[piece.tensor].dtype]
        for part in split(piece, max(1, most_bytes // item_bytes)):
            sender = min(holders, key=lambda rank: (load[rank], rank))
            size = padded_bytes(manifest, part)
            load[sender] += size
            key = (sender, receivers)
            if key in open_ and filled[key] + size > most_bytes:
                close(key)
            open_.setdefault(key, []).append(part)
            filled[key] += size
    for key in list(open_):
        close(key)
    return done


class _Routes:
    """Chooses the way of every chunk through the hosts."""

    def __init__(self, hosts: Mapping[int, str], senders: set[int]) -> None:
        self._hosts = hosts
        self._num_sending_hosts = len({hosts[rank] for rank in senders})
        self._received: dict[int, int] = defaultdict(int)

    def tree(self, source: int, receivers: tuple[int, ...], chunk: Chunk) -> list[tuple[int, int]]:
        """Returns the hops (from, to) of a chunk; each begins where an earlier one ended."""
        here = self._hosts[source]
        by_host: dict[str, list[int]] = defaultdict(list)
        for rank in receivers:
            by_host[self._hosts[rank]].append(rank)
        hops = [(source, rank) for rank in by_host.pop(here, [])]
        others = sorted(by_host)
        # As many chains as hosts send: then a sender's link carries no more than a receiver's.
        chains = max(1, min(len(others), self._num_sending_hosts))
        tails = [source] * chains
        for position, host in enumerate(others):
            entry = min(by_host[host], key=lambda rank: (self._received[rank], rank))
            self._received[entry] += chunk.num_bytes
            hops.append((tails[position % chains], entry))
            hops.extend((entry, rank) for rank in by_host[host] if rank != entry)
            tails[position % chains] = entry
        return hops


class _Rank:
    """A rank while rounds are made."""

    def __init__(self) -> None:
        self.ready: dict[int, deque[int]] = {}
        """Chunks that it can send, by receiver."""
        self.held: dict[int, int] = {}
        """Chunks that it holds for forwarding, with the number of receivers still to come."""


class _Schedule:
    """Puts the hops of all chunks into rounds."""

    def __init__(self, hosts: Mapping[int, str], trees: Sequence[list[tuple[int, int]]]) -> None:
        self._hosts = hosts
        self._onward: list[dict[int, list[int]]] = []
        """The ranks that each rank sends a chunk to, for every chunk."""
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._left = sum(map(len, trees))
        for number, hops in enumerate(trees):
            onward: dict[int, list[int]] = defaultdict(list)
            for source, to in hops:
                onward[source].append(to)
            self._onward.append(onward)
            self._offer(number, hops[0][0])

    def rounds(self) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Yields rounds until every hop of every chunk has its place."""
        turn = 0
        while self._left:
            hops: list[tuple[int, int, int]] = []
            receiving: set[int] = set()
            entering: dict[str, int] = defaultdict(int)
            for source in [rank for rank, state in self._ranks.items() if state.ready]:
                hop = self._choose(source, receiving, entering, turn)
                if hop is not None:
                    receiving.add(hop[2])
                    entering[self._hosts[hop[2]]] += self._hosts[source] != self._hosts[hop[2]]
                    hops.append(hop)
            assert hops, "chains follow one order of the hosts, so some rank can always send"
            for hop in hops:
                self._done(*hop)
            yield tuple(hops)
            turn, self._left = turn + 1, self._left - len(hops)

    def _offer(self, chunk: int, rank: int) -> None:
        """Makes `chunk` ready at `rank` for every rank that it sends the chunk to."""
        for to in self._onward[chunk].get(rank, ()):
            self._ranks[rank].ready.setdefault(to, deque()).append(chunk)

    def _choose(
        self, source: int, receiving: set[int], entering: Mapping[str, int], turn: int
    ) -> tuple[int, int, int] | None:
        """Returns the hop that `source` makes in this round, or None: to a receiver that is not
        receiving yet and has room. Of these it takes one on the host that fewest chunks enter in
        this round, since workers of a host may share a link, and the next in its own rotation.
        """
        ready = self._ranks[source].ready
        peers = sorted(ready)
        first = (source + turn) % len(peers)

        def may_send(to: int) -> bool:
            has_room = (
                len(self._ranks[to].held) < HELD_CHUNKS or to not in self._onward[ready[to][0]]
            )
            return to not in receiving and has_room

        def load(to: int) -> int:
            is_near = self._hosts[source] == self._hosts[to]
            return 0 if is_near else entering.get(self._hosts[to], 0)

        choices = filter(may_send, (*peers[first:], *peers[:first]))
        to = min(choices, key=load, default=None)
        return None if to is None else (ready[to][0], source, to)

    def _done(self, chunk: int, source: int, to: int) -> None:
        state = self._ranks[source]
        state.ready[to].popleft()
        if not state.ready[to]:
            del state.ready[to]
        if chunk in state.held:
            state.held[chunk] -= 1
            if state.held[chunk] == 0:
                del state.held[chunk]
        if to in self._onward[chunk]:
            self._ranks[to].held[chunk] = len(self._onward[chunk][to])
            self._offer(chunk, to)
