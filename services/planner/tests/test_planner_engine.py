"""The closed forms of the simulated engine against a loop that decodes token by token."""

import random
from math import ceil

import pytest

from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.generators import NEVER, SimulatedEngine, SimulatedSequence

BLOCK_TOKENS = 16
CLUSTER = SimulatedCluster(
    kv_tokens=BLOCK_TOKENS * 40,
    max_sequences=6,
    decode_step_s=0.01,
    decode_token_s=1e-4,
    prefill_tokens_per_s=1000.0,
)


def run_closed(
    arrivals: list[tuple[float, SimulatedSequence]], cluster: SimulatedCluster
) -> tuple[dict[str, float], SimulatedEngine]:
    """When each sequence ends."""
    engine = SimulatedEngine(cluster)
    ends = {}
    pending = list(arrivals)
    while pending or engine.running or engine.waiting:
        at = engine.next_event()
        if pending and pending[0][0] <= at:
            now, sequence = pending.pop(0)
            engine.add(sequence, now)
        else:
            ends.update({sequence.group: at for sequence in engine.handle_event()})
    return ends, engine


class TokenByToken:
    """The same rules, one decode step at a time."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.clock = 0.0
        self.running: list[list[int]] = []  # [index, context, tokens left]
        self.waiting: list[list[int]] = []
        self.num_preemptions = 0

    def blocks(self) -> int:
        return sum(ceil(context / BLOCK_TOKENS) for _, context, _ in self.running)

    def free(self) -> int:
        return self.cluster.kv_tokens // BLOCK_TOKENS - self.blocks()

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.cluster.max_sequences:
            if ceil((self.waiting[0][1] + 1) / BLOCK_TOKENS) > self.free():
                return
            one = self.waiting.pop(0)
            self.clock += one[1] / self.cluster.prefill_tokens_per_s
            self.running.append(one)

    def step_seconds(self) -> float:
        return self.cluster.decode_step_s + self.cluster.decode_token_s * sum(
            context for _, context, _ in self.running
        )

    def make_room(self) -> None:
        while sum(context % BLOCK_TOKENS == 0 for _, context, _ in self.running) > self.free():
            self.waiting.insert(0, self.running.pop())
            self.num_preemptions += 1

    def run(self, arrivals: list[tuple[float, SimulatedSequence]]) -> dict[str, float]:
        ends: dict[str, float] = {}
        pending = list(arrivals)
        names: list[str] = []
        while pending or self.running or self.waiting:
            if not pending or (self.running and pending[0][0] > self.clock):
                self.make_room()
            if pending and (not self.running or self.clock + self.step_seconds() > pending[0][0]):
                now, sequence = pending.pop(0)
                self.clock = self.clock if self.running else max(self.clock, now)
                names.append(sequence.group)
                self.waiting.append([len(names) - 1, sequence.prompt, sequence.length])
                if len(self.waiting) == 1:
                    self.fill()
                continue
            self.clock += self.step_seconds()
            for one in self.running:
                one[1] += 1
                one[2] -= 1
            done = [one for one in self.running if one[2] == 0]
            ends.update({names[one[0]]: self.clock for one in done})
            self.running = [one for one in self.running if one[2] > 0]
            if done:
                self.fill()
        return ends


@pytest.mark.parametrize("seed", range(60))
def test_closed_forms_equal_decoding_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    now = 0.0
    arrivals = []
    for index in range(rng.randint(1, 25)):
        now += rng.choice((0.0, rng.uniform(0, 3)))
        arrivals.append((now, (str(index), rng.randint(1, 60), rng.randint(1, 300))))

    def fresh() -> list[tuple[float, SimulatedSequence]]:
        return [(at, SimulatedSequence(*what)) for at, what in arrivals]

    ends, engine = run_closed(fresh(), CLUSTER)
    reference = TokenByToken(CLUSTER)
    expected = reference.run(fresh())
    assert ends == pytest.approx(expected, rel=1e-9)
    assert engine.num_preemptions == reference.num_preemptions
    assert engine.kv_usage == 0
    assert engine._context == 0


def test_the_random_traces_preempt() -> None:
    assert any(_preemptions(seed) > 3 for seed in range(10))


def _preemptions(seed: int) -> int:
    rng = random.Random(seed)
    sequences = [
        (0.0, SimulatedSequence(str(index), 30, rng.randint(100, 300))) for index in range(6)
    ]
    return run_closed(sequences, CLUSTER)[1].num_preemptions


def test_hand_computed_end_of_two_sequences() -> None:
    """Prefill of 10 + 10 tokens at 1000/s, then steps of 10 ms and 0.1 ms per token of context,
    contexts 20, 22, 24.
    """
    sequences = [(0.0, SimulatedSequence("a", 10, 3)), (0.0, SimulatedSequence("b", 10, 3))]
    ends, _ = run_closed(sequences, CLUSTER)
    assert ends == pytest.approx({"a": 0.02 + 0.03 + 1e-4 * 66, "b": 0.02 + 0.03 + 1e-4 * 66})


def test_publish_stops_the_clock_and_prefills_again_unless_the_cache_is_kept() -> None:
    for keeps_kv, refilled in ((True, 0), (False, 110)):
        engine = SimulatedEngine(CLUSTER)
        engine.add(SimulatedSequence("a", 100, 50), 0.0)
        tenth_step = 0.1 + 10 * 0.01 + 1e-4 * (10 * 100 + 45)
        engine.pause(tenth_step + 1e-6)
        assert engine.next_event() == NEVER
        before = engine.next_event()
        engine.resume(100.0, keeps_kv)
        assert before == NEVER
        assert engine.num_refilled_tokens == refilled
        rest = 40 * 0.01 + 1e-4 * (40 * 110 + 40 * 39 / 2)
        assert engine.next_event() == pytest.approx(100.0 + refilled / 1000 + rest)


def test_cancelled_sequences_free_their_blocks_for_waiting_ones() -> None:
    engine = SimulatedEngine(CLUSTER)
    first, second = SimulatedSequence("a", 600, 30), SimulatedSequence("b", 600, 30)
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    assert (list(engine.running), list(engine.waiting)) == ([first], [second])
    engine.remove([first], 0.7)
    assert first.num_generated == 1  # prefill 0.6 s, one step of 0.07 s
    assert (list(engine.running), list(engine.waiting)) == ([second], [])


def test_a_sequence_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_tokens=640 cannot hold one sequence of 641 tokens"):
        run_closed([(0.0, SimulatedSequence("a", 10, 700))], CLUSTER)
