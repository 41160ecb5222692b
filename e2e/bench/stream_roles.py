"""The two ends of the stream bench, each a process: `python -m bench.stream_roles ROLE TRANSPORT
...`.

A role prepares, prints `ready`, waits for a line on standard input, does its work and prints its
measurement as a line of JSON.

The baseline is one pickled dict of Python lists per XADD and one entry per XREAD, without
pipelining or acknowledgement: that is how the reference system moves a sample between its
processes. Pickle is here to be measured against; the product never uses it.
"""

import argparse
import asyncio
import json
import pickle
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import redis

from bench.stream import Measurement
from bench.trajectories import Workload, cycle
from pipelinerl_common.codec import encode_group
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.stream import connect
from pipelinerl_common.types import FinishReason, Sample, SampleGroup

JOB = "bench"
PUBLISHING = 8
"""Groups that the producer publishes concurrently, as an actor with that many finished groups does.
"""
MAX_PENDING = 256
STREAM = "actor"
MAX_ENTRIES = 1_000_000
BLOCK_MS = 1000
NOT_TRAINED = -100


class Meter:
    """Measures time and CPU time between entering and leaving; the role itself adds the counts."""

    def __init__(self) -> None:
        self.num_samples = self.num_tokens = self.payload_bytes = 0
        self._started = self._ended = self._cpu_seconds = 0.0

    def __enter__(self) -> "Meter":
        self._cpu_seconds, self._started = -_own_cpu_seconds(), time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = time.monotonic()
        self._cpu_seconds += _own_cpu_seconds()

    def count(self, num_samples: int, num_tokens: int, payload_bytes: int = 0) -> None:
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.payload_bytes += payload_bytes

    def measurement(self) -> Measurement:
        """Times, CPU and counts of this role."""
        return Measurement(
            self._started,
            self._ended,
            self._cpu_seconds,
            self.num_samples,
            self.num_tokens,
            self.payload_bytes,
        )


async def produce_jetstream(port: int, workload: Workload) -> Measurement:
    """Publishes every group through the product's stream and waits for each acknowledgement."""
    pool, meter = workload.groups(), Meter()
    async with connect(
        f"nats://127.0.0.1:{port}", JOB, StreamSettings(), name="bench-producer"
    ) as connection:
        await _wait_for_start()
        groups = cycle(pool, workload.num_groups)

        async def publish() -> None:
            for group in groups:
                await connection.publish_group(group)

        with meter:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(PUBLISHING):
                    tasks.create_task(publish())
        for group in cycle(pool, workload.num_groups):
            num_bytes = sum(
                len(part.payload) for part in encode_group(group, connection.max_payload_bytes)
            )
            meter.count(len(group.samples), _num_tokens(group), num_bytes)
    return meter.measurement()


async def consume_jetstream(port: int, workload: Workload) -> Measurement:
    """Receives, decodes and acknowledges every group through the product's durable consumer."""
    meter = Meter()
    async with (
        connect(
            f"nats://127.0.0.1:{port}", JOB, StreamSettings(), name="bench-consumer"
        ) as connection,
        connection.samples(MAX_PENDING) as groups,
    ):
        await _wait_for_start()
        with meter:
            async for received in groups:
                meter.count(len(received.group.samples), _num_tokens(received.group))
                await received.ack()
                if meter.num_samples >= workload.num_samples:
                    break
    return meter.measurement()


async def produce_redis(port: int, workload: Workload) -> Measurement:
    """Writes every sample as the baseline does."""
    pool, meter = training_texts(workload), Meter()
    writer = Writer(port)
    await _wait_for_start()
    with meter:
        for number in range(workload.num_groups):
            for text in pool[number % len(pool)]:
                text["group_id"] = f"train_{number}"
                writer.write(text)
    for number in range(workload.num_groups):
        for text in pool[number % len(pool)]:
            meter.count(1, len(text["input_ids"]), len(encode(text)))
    return meter.measurement()


async def consume_redis(port: int, workload: Workload) -> Measurement:
    """Reads every sample as the baseline does."""
    texts, meter = read(port), Meter()
    await _wait_for_start()
    with meter:
        for text in islice(texts, workload.num_samples):
            meter.count(1, len(text["input_ids"]))
    return meter.measurement()


ROLES: dict[tuple[str, str], Callable[[int, Workload], Awaitable[Measurement]]] = {
    ("produce", "jetstream"): produce_jetstream,
    ("consume", "jetstream"): consume_jetstream,
    ("produce", "redis"): produce_redis,
    ("consume", "redis"): consume_redis,
}


def _num_tokens(group: SampleGroup) -> int:
    return sum(len(sample.token_ids_S) for sample in group.samples)


async def _wait_for_start() -> None:
    print("ready", flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        sys.exit("the bench has ended")


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _run(role: str, transport: str, port: int, workload: Workload) -> None:
    print(json.dumps(asdict(await ROLES[role, transport](port, workload))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="stream_roles", description="One end of `e2e/bench/run stream`."
    )
    parser.add_argument("role", choices=["produce", "consume"])
    parser.add_argument("transport", choices=["jetstream", "redis"])
    parser.add_argument("port", type=int)
    parser.add_argument("workload", help="fields of Workload as JSON")
    args = parser.parse_args()
    asyncio.run(_run(args.role, args.transport, args.port, Workload(**json.loads(args.workload))))


class Writer:
    """The baseline's producer: one XADD per sample, with a running index beside the pickle."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis("127.0.0.1", port)
        self._client.ping()
        self._index = 0

    def write(self, text: dict[str, Any]) -> None:
        entry = {"index": self._index, "data": encode(text)}
        self._client.xadd(STREAM, entry, maxlen=MAX_ENTRIES, approximate=True)
        self._index += 1


def encode(text: dict[str, Any]) -> bytes:
    """The payload of one sample."""
    return pickle.dumps(text)


def read(port: int, deadline_reads: int = 60) -> Iterator[dict[str, Any]]:
    """Samples from the beginning of the stream, one XREAD each. Raises TimeoutError after
    `deadline_reads` empty seconds.
    """
    client = redis.Redis("127.0.0.1", port)
    last_id, empty = b"0", 0
    while empty < deadline_reads:
        response: Any = client.xread({STREAM: last_id}, count=1, block=BLOCK_MS)
        if not response:
            empty += 1
            continue
        [[_, [[last_id, fields]]]] = response
        yield pickle.loads(fields[b"data"])
    raise TimeoutError(f"no sample for {deadline_reads} s")


def training_texts(workload: Workload) -> list[list[dict[str, Any]]]:
    """The workload's pool in the baseline's form: a list of dicts per group."""
    return [
        [_training_text(group, sample) for sample in group.samples] for group in workload.groups()
    ]


def _training_text(group: SampleGroup, sample: Sample) -> dict[str, Any]:
    """One trajectory with the reference's fields. Labels are -100 on the prompt; reference
    log-probs are filled a hop later.
    """
    num_prompt = sample.segment_lengths[0]
    input_ids = sample.token_ids_S.tolist()
    return {
        "text": "word " * len(input_ids),
        "n_predicted": 5 * sample.num_sampled,
        "reward": sample.reward,
        "logprobs": sample.logprobs_T.tolist(),
        "ref_logprobs": [],
        "input_ids": input_ids,
        "labels": [NOT_TRAINED] * num_prompt + input_ids[num_prompt:],
        "group_id": f"train_{group.prompt_index}",
        "finished": sample.finish_reason is FinishReason.STOP,
        "prompt_tokens": num_prompt,
        "output_tokens": sample.num_sampled,
        "visual_features": None,
        "metadata": {"model_version": group.birth, "rollout_index": sample.index, "step_index": 0},
    }


if __name__ == "__main__":
    main()
