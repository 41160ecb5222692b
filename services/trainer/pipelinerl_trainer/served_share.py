"""The share of the weights that this rank sends to the generators.

Every rank sends, so that every rank's link works and no rank keeps a whole copy of the model. With
ZeRO 1 and 2 each rank holds all weights and takes an even share of them; with ZeRO 3 it takes its
own partition, and nothing is gathered.
"""

import math
from collections.abc import Iterator

import torch

from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.ranks import Ranks
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.snapshot import Extent, WeightSnapshot, even_extents


class ServedShare:
    """This rank's share; every rank must call its methods in the same order."""

    def __init__(self, engine: DeepSpeedEngine, manifest: Manifest, ranks: Ranks) -> None:
        self._engine, self._manifest, self._ranks = engine, manifest, ranks
        self._index = {spec.name: index for index, spec in enumerate(manifest.tensors)}
        self._is_partitioned = engine.zero_stage == 3 and ranks.num_ranks > 1
        self._whole: list[str] = []
        """Parameters that are gathered, because their tensors are no ranges of them."""
        self._sources: list[tuple[str, int, int]] = []
        """Where each extent is: parameter, and first and last item of the partition of it."""
        if self._is_partitioned:
            self.extents = (*self._partitioned(), *self._gathered())
        else:
            self.extents = even_extents(manifest, ranks.rank, ranks.num_ranks)

    @torch.no_grad()
    def snapshot(self) -> WeightSnapshot:
        """Copies the weights as they are now into host memory."""
        snapshot = WeightSnapshot.empty(self._manifest, self.extents)
        if not self._is_partitioned:
            snapshot.fill(self._engine.served_weights())
            return snapshot
        partitions = {name: partition for name, partition, _ in self._engine.partitions()}
        for position, (name, begin, end) in enumerate(self._sources):
            snapshot.view(position).copy_(partitions[name][begin:end])
        if self._whole:
            self._copy_gathered(snapshot)
        return snapshot

    def _copy_gathered(self, snapshot: WeightSnapshot) -> None:
        rest = enumerate(self.extents[len(self._sources) :], len(self._sources))
        mine = {extent.tensor: position for position, extent in rest}
        for name, tensor in self._engine.gathered(self._whole):
            position = mine.get(self._index[name])
            if position is not None:
                _, begin, end = self.extents[position]
                snapshot.view(position).copy_(tensor.reshape(-1)[begin:end])

    def _partitioned(self) -> Iterator[Extent]:
        """Yields what this rank's partitions have of each tensor, and notes where it is."""
        ranges = self._engine.served_ranges()
        for name, partition, first in self._engine.partitions():
            stored = ranges[name]
            if stored is None:
                self._whole.append(name)
                continue
            for tensor, offset in stored:
                index = self._index[tensor]
                count = math.prod(self._manifest.tensors[index].shape)
                begin = max(0, first - offset)
                end = min(count, first + partition.numel() - offset)
                if begin < end:
                    shift = offset - first
                    self._sources.append((name, begin + shift, end + shift))
                    yield Extent(index, begin, end)

    def _gathered(self) -> Iterator[Extent]:
        """Yields an even share of every tensor of the parameters that are gathered."""
        rank, num_ranks = self._ranks.rank, self._ranks.num_ranks
        for name in self._whole:
            for tensor, shape in self._engine.stored_shapes(name):
                count = math.prod(shape)
                begin, end = (count * part // num_ranks for part in (rank, rank + 1))
                if begin < end:
                    yield Extent(self._index[tensor], begin, end)
