"""The simulated generators: all engines, and the requests in front of them."""

from collections import deque
from heapq import heappop, heappush

from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.engine import NEVER, SimulatedEngine, SimulatedSequence


class SimulatedGenerators:
    """All engines, and the requests that wait in front of them for a trajectory slot. A slot is
    held from the time that a request is sent until its answer has arrived.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._request_s = cluster.request_s
        self._by_actors = cluster.max_leased is not None or cluster.request_s > 0
        self._num_slots = cluster.max_sequences * cluster.num_engines
        self._sent: list[tuple[float, int, int, SimulatedSequence]] = []
        """Requests on their way to an engine, by time of arrival."""
        self._num_sent = 0
        self._engine_of: dict[SimulatedSequence, int] = {}
        self.engines = [SimulatedEngine(cluster) for _ in range(cluster.num_engines)]
        self.queue: deque[SimulatedSequence] = deque()
        self.limit: int | None = None
        self._loads = [0] * cluster.num_engines
        self._events: list[tuple[float, int, int]] = []
        self._epochs = [0] * cluster.num_engines
        self._index = {engine: index for index, engine in enumerate(self.engines)}

    def start(self, now: float) -> None:
        """Sends queued requests to the engine with the fewest sequences, within the limit."""
        if not self.queue:
            return
        changed = set()
        room = len(self.queue) if self.limit is None else self.limit - sum(self._loads)
        if self._by_actors:
            room = min(room, self._num_slots - sum(self._loads))
        for _ in range(min(room, len(self.queue))):
            index = self._loads.index(min(self._loads))
            sequence = self.queue.popleft()
            self._loads[index] += 1
            self._engine_of[sequence] = index
            if self._request_s:
                self._num_sent += 1
                heappush(self._sent, (now + self._request_s / 2, self._num_sent, index, sequence))
            else:
                self.engines[index].add(sequence, now)
                changed.add(index)
        for index in changed:
            self._schedule(index)

    def next_event(self) -> float:
        while self._events and self._events[0][2] != self._epochs[self._events[0][1]]:
            heappop(self._events)
        at = self._events[0][0] if self._events else NEVER
        return min(at, self._sent[0][0]) if self._sent else at

    def handle_event(self, now: float) -> list[SimulatedSequence]:
        """Returns the sequences that ended; they hold their slots until they are released."""
        if self._sent and self._sent[0][0] <= now:
            _, _, index, sequence = heappop(self._sent)
            if not sequence.cancelled:
                self.engines[index].add(sequence, now)
                self._schedule(index)
            return []
        _, index, _ = heappop(self._events)
        ended = self.engines[index].handle_event()
        self._schedule(index)
        return ended

    def release(self, sequence: SimulatedSequence) -> None:
        """Frees the sequence's slot; idempotent, because a cancellation frees it too."""
        index = self._engine_of.pop(sequence, None)
        if index is not None:
            self._loads[index] -= 1

    def generated(self, sequence: SimulatedSequence) -> int:
        return (
            sequence.engine.generated(sequence)
            if sequence.engine is not None
            else sequence.num_generated
        )

    def in_flight(self) -> list[SimulatedSequence]:
        return [
            sequence for engine in self.engines for sequence in (*engine.running, *engine.waiting)
        ]

    def cancel(self, sequences: list[SimulatedSequence], now: float) -> None:
        by_engine: dict[int, list[SimulatedSequence]] = {}
        queued = set()
        for sequence in sequences:
            sequence.cancelled = True
            if sequence.end_step >= 0 or sequence.engine is not None or sequence.num_generated == 0:
                self.release(sequence)
            if sequence.engine is not None:
                by_engine.setdefault(self._index[sequence.engine], []).append(sequence)
            elif sequence.num_generated == 0:
                queued.add(sequence)
        if queued:
            self.queue = deque(sequence for sequence in self.queue if sequence not in queued)
        for index, cancelled in by_engine.items():
            self.engines[index].remove(cancelled, now)
            self._schedule(index)

    def pause(self, now: float) -> None:
        for index, engine in enumerate(self.engines):
            engine.pause(now)
            self._schedule(index)

    def resume(self, now: float, keeps_kv: bool) -> None:
        for index, engine in enumerate(self.engines):
            engine.resume(now, keeps_kv)
            self._schedule(index)

    def load(self, now: float) -> tuple[float, int]:
        """Returns KV usage of the fullest engine and the number of requests waiting for blocks."""
        for engine in self.engines:
            engine.advance(now)
        return max(engine.kv_usage for engine in self.engines), sum(
            len(engine.waiting) for engine in self.engines
        )

    def integrals(self, now: float) -> tuple[float, float]:
        """Returns running sequences of all engines and mean KV usage, each integrated over time."""
        for engine in self.engines:
            engine.advance(now)
        usage = sum(engine.kv_usage_seconds for engine in self.engines) / len(self.engines)
        return sum(engine.running_seconds for engine in self.engines), usage

    def effort(self) -> tuple[int, int]:
        """Returns preemptions and tokens that were prefilled again so far."""
        return sum(e.num_preemptions for e in self.engines), sum(
            e.num_refilled_tokens for e in self.engines
        )

    def _schedule(self, index: int) -> None:
        self._epochs[index] += 1
        at = self.engines[index].next_event()
        if at < NEVER:
            heappush(self._events, (at, index, self._epochs[index]))
