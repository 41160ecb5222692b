import argparse
import pickle
import shutil

import pytest

from bench import stream, stream_roles
from bench.trajectories import Workload, cycle
from pipelinerl_common.types import FinishReason

WORKLOAD = Workload(
    num_groups=5, num_distinct=2, group_size=3, median_tokens=40, max_tokens=100, seed=7
)


def arguments() -> argparse.Namespace:
    return argparse.Namespace(
        quick=True, seed=1, group_size=8, median_tokens=900, max_tokens=8192, groups=1, rounds=1
    )


def test_workload_is_the_same_in_every_process_and_its_columns_fit() -> None:
    groups, again = WORKLOAD.groups(), WORKLOAD.groups()
    assert len(groups) == 2
    for group, other in zip(groups, again, strict=True):
        for sample, twin in zip(group.samples, other.samples, strict=True):
            assert sample.token_ids_S.tolist() == twin.token_ids_S.tolist()
            assert sum(sample.segment_lengths) == len(sample.token_ids_S)
            assert (
                sample.segment_lengths[1]
                == len(sample.logprobs_T)
                == sum(run.num_tokens for run in sample.version_runs)
            )
            assert 1 <= len(sample.logprobs_T) <= 100
            assert (sample.finish_reason is FinishReason.LENGTH) == (len(sample.logprobs_T) == 100)


def test_cycled_groups_have_ids_of_their_own() -> None:
    assert [group.group_id for group in cycle(WORKLOAD.groups(), 5)] == [
        "0-0",
        "0-1",
        "0-2",
        "0-3",
        "0-4",
    ]


def test_baseline_carries_the_same_trajectories_as_lists() -> None:
    for group, texts in zip(WORKLOAD.groups(), stream_roles.training_texts(WORKLOAD), strict=True):
        for sample, text in zip(group.samples, texts, strict=True):
            read = pickle.loads(stream_roles.encode(text))
            assert read["input_ids"] == sample.token_ids_S.tolist()
            assert read["labels"][: read["prompt_tokens"]] == [-100] * sample.segment_lengths[0]
            assert (
                read["labels"][read["prompt_tokens"] :]
                == read["input_ids"][read["prompt_tokens"] :]
            )
            assert len(read["logprobs"]) == read["output_tokens"] == sample.num_sampled


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_stream_bench_measures_both_sides() -> None:
    values = stream.bench(arguments()).values
    assert {"samples_per_second_ratio", "cpu_per_token_ratio", "bytes_per_token"} <= values.keys()
    ours, baseline = values["ours"], values["baseline"]
    assert isinstance(ours, dict)
    assert isinstance(baseline, dict)
    assert ours["num_samples"] == baseline["num_samples"] == 800
    assert ours["num_tokens"] == baseline["num_tokens"]
    assert isinstance(values["bytes_per_token"], float)
    assert 4 < values["bytes_per_token"] <= 12
    assert all(
        isinstance(number, int | float) and number > 0
        for number in (*ours.values(), *baseline.values())
    )


def test_without_a_redis_server_it_is_skipped_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    report = stream.bench(arguments())
    assert report.skipped is not None
    assert "install" in report.skipped
