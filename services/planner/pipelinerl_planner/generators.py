"""The simulated generators: engines that batch continuously over KV blocks, with preemption and a
second prefill, and the requests in front of them.

Every running sequence grows by one token per decode step, so between two changes of the set of
running sequences all is closed form: n steps from context C with R sequences take n * (a + c * R) +
b * (n * C + R * n * (n - 1) / 2) seconds, and a sequence needs a new block when its last one is
full. Events are only the end of a sequence and the step for which blocks run out.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from math import sqrt

from pipelinerl_planner.cluster import SimulatedCluster

NEVER = float("inf")


class SimulatedSequence:
    """One trajectory. `num_generated` is valid only while it does not run; otherwise the engine
    knows.
    """

    __slots__ = (
        "cancelled",
        "end_step",
        "engine",
        "group",
        "length",
        "num_generated",
        "prompt",
        "segments",
        "start_context",
    )

    def __init__(self, group: str, prompt: int, length: int) -> None:
        self.group = group
        self.prompt = prompt
        self.length = length
        self.num_generated = 0
        self.engine: SimulatedEngine | None = None
        self.end_step = -1
        """The engine's step count at its last token, while it runs."""
        self.start_context = 0
        """Context minus the engine's step count, while it runs."""
        self.cancelled = False
        self.segments: list[tuple[int, int]] = []
        """(version, tokens) of the tokens generated up to the last publish."""


class SimulatedEngine:
    """One generator in virtual time. `clock` is the time at which the next decode step may begin: a
    step boundary in the past, or the end of a prefill.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._block_tokens = cluster.block_tokens
        self._num_blocks = cluster.kv_tokens // cluster.block_tokens
        self.clock = 0.0
        self.running: dict[SimulatedSequence, None] = {}
        self.waiting: deque[SimulatedSequence] = deque()
        self.num_preemptions = 0
        self.num_refilled_tokens = 0
        self.running_seconds = 0.0
        """Running sequences, integrated over time up to `clock`."""
        self.kv_usage_seconds = 0.0
        self.paused = False
        self._step = 0
        self._context = 0
        self._used = 0
        self._phases = [0] * self._block_tokens
        self._ends: list[tuple[int, int, SimulatedSequence]] = []
        self._num_joined = 0

    @property
    def kv_usage(self) -> float:
        return self._used / self._num_blocks

    def generated(self, sequence: SimulatedSequence) -> int:
        """Returns the sequence's response tokens so far."""
        if sequence.end_step < 0:
            return sequence.num_generated
        return sequence.length - (sequence.end_step - self._step)

    def add(self, sequence: SimulatedSequence, now: float) -> None:
        sequence.engine = self
        self.waiting.append(sequence)
        if len(self.waiting) == 1:
            self.advance(now)
            self._fill(now)

    def remove(self, sequences: Iterable[SimulatedSequence], now: float) -> None:
        """Cancels sequences of this engine, running or waiting."""
        self.advance(now)
        for sequence in sequences:
            if sequence in self.running:
                sequence.num_generated = self.generated(sequence)
                self._leave(sequence)
            elif sequence.engine is self:
                self.waiting.remove(sequence)
            sequence.engine = None
        self._fill(now)

    def advance(self, now: float) -> None:
        """Runs the decode steps that end by `now`."""
        if self.paused or not self.running or now <= self.clock:
            return
        steps = min(self._steps_within(now - self.clock), self._steps_to_event())
        self._run(steps)

    def next_event(self) -> float:
        """Returns the time at which a sequence ends or blocks run out if nothing else happens."""
        if self.paused or not self.running:
            return NEVER
        return self.clock + self._seconds(self._steps_to_event())

    def handle_event(self) -> list[SimulatedSequence]:
        """Advances to the next event and returns the sequences that ended."""
        self._run(self._steps_to_event())
        ended = []
        while self._ends and self._ends[0][0] <= self._step:
            end_step, _, sequence = heappop(self._ends)
            if sequence.end_step == end_step and sequence in self.running:
                sequence.num_generated = sequence.length
                self._leave(sequence)
                sequence.engine = None
                ended.append(sequence)
        if ended:
            self._fill(self.clock)
        while (
            self.running
            and self._num_blocks - self._used < self._phases[-self._step % self._block_tokens]
        ):
            self._preempt_last()
        if not self.running:
            self._fill(self.clock)
        return ended

    def pause(self, now: float) -> None:
        self.advance(now)
        self.paused = True

    def resume(self, now: float, keeps_kv: bool) -> None:
        self.paused = False
        self._stand(now - self.clock)
        if not keeps_kv and self.running:
            self._prefill(self._context)
            self.num_refilled_tokens += self._context
        self._fill(now)

    def _fill(self, now: float) -> None:
        """Lets waiting sequences join, in order, while there are blocks."""
        if self.paused:
            return
        if not self.running:
            self.clock = max(self.clock, now)
        while self.waiting and len(self.running) < self._cluster.max_sequences:
            sequence = self.waiting[0]
            context = sequence.prompt + sequence.num_generated
            if -(-(context + 1) // self._block_tokens) > self._num_blocks - self._used:
                if not self.running:
                    raise ValueError(
                        f"kv_tokens={self._cluster.kv_tokens} cannot hold one sequence of "
                        f"{context + 1} tokens: raise it or cap the lengths"
                    )
                return
            self.waiting.popleft()
            self._join(sequence, context)

    def _join(self, sequence: SimulatedSequence, context: int) -> None:
        self._prefill(context)
        if sequence.num_generated:
            self.num_refilled_tokens += context
        sequence.end_step = self._step + sequence.length - sequence.num_generated
        sequence.start_context = context - self._step
        self.running[sequence] = None
        self._context += context
        self._used += -(-context // self._block_tokens)
        self._phases[sequence.start_context % self._block_tokens] += 1
        self._num_joined += 1
        heappush(self._ends, (sequence.end_step, self._num_joined, sequence))

    def _leave(self, sequence: SimulatedSequence) -> None:
        context = sequence.start_context + self._step
        del self.running[sequence]
        sequence.end_step = -1
        self._context -= context
        self._used -= -(-context // self._block_tokens)
        self._phases[sequence.start_context % self._block_tokens] -= 1

    def _preempt_last(self) -> None:
        sequence = next(reversed(self.running))
        sequence.num_generated = self.generated(sequence)
        self._leave(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _prefill(self, tokens: int) -> None:
        self._stand(tokens / self._cluster.prefill_tokens_per_s)

    def _stand(self, seconds: float) -> None:
        """Lets time pass without decoding."""
        if seconds > 0:
            self.clock += seconds
            self.running_seconds += len(self.running) * seconds
            self.kv_usage_seconds += self.kv_usage * seconds

    def _run(self, steps: int) -> None:
        seconds, used = self._seconds(steps), self._used
        self.clock += seconds
        cycles, rest = divmod(steps, self._block_tokens)
        new_blocks = cycles * len(self.running)
        for step in range(self._step, self._step + rest):
            new_blocks += self._phases[-step % self._block_tokens]
        self._used += new_blocks
        self.running_seconds += len(self.running) * seconds
        self.kv_usage_seconds += (used + self._used) / 2 / self._num_blocks * seconds
        self._context += steps * len(self.running)
        self._step += steps

    def _seconds(self, steps: int) -> float:
        growth = len(self.running) * steps * (steps - 1) / 2
        return steps * self._step_s() + self._cluster.decode_token_s * (
            steps * self._context + growth
        )

    def _step_s(self) -> float:
        """Returns the seconds of a decode step without what its context adds."""
        return self._cluster.decode_step_s + self._cluster.decode_sequence_s * len(self.running)

    def _steps_within(self, seconds: float) -> int:
        """Returns the steps that fit into `seconds`: the inverse of `_seconds`, rounded down."""
        square = self._cluster.decode_token_s * len(self.running) / 2
        linear = self._step_s() + self._cluster.decode_token_s * self._context - square
        if square * seconds < 1e-12 * linear * linear:
            return int(seconds / linear + 1e-9)
        return int((sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square) + 1e-9)

    def _steps_to_event(self) -> int:
        ends = self._ends
        while ends[0][2].end_step != ends[0][0] or ends[0][2] not in self.running:
            heappop(ends)
        steps = ends[0][0] - self._step
        enough = (steps // self._block_tokens + 1) * len(self.running)
        return (
            steps
            if self._num_blocks - self._used >= enough
            else min(steps, self._steps_to_exhaustion())
        )

    def _steps_to_exhaustion(self) -> int:
        """Returns the number of decode steps before one needs more blocks than are free."""
        free = self._num_blocks - self._used
        cycles, free = divmod(free, len(self.running))
        steps = cycles * self._block_tokens
        for step in range(self._step + steps, self._step + steps + self._block_tokens):
            free -= self._phases[-step % self._block_tokens]
            if free < 0:
                return step - self._step
        return steps + self._block_tokens


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
