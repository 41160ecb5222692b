"""The baseline: one pickled dict of Python lists per XADD, one entry per XREAD, no pipelining, no
acknowledgement.

That is how the reference system moves a sample between its processes. Pickle is here to be measured
against; the product never uses it.
"""

import pickle
from collections.abc import Iterator
from typing import Any

import redis

from bench.trajectories import Workload
from pipelinerl_common.types import FinishReason, Sample, SampleGroup

STREAM = "actor"
MAX_ENTRIES = 1_000_000
BLOCK_MS = 1000
NOT_TRAINED = -100


class Writer:
    """One XADD per sample, with a running index beside the pickle."""

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
