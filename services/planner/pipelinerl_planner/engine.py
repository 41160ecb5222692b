"""One simulated generator: continuous batching over KV blocks, with preemption and a second
prefill.

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
