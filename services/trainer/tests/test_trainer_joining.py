"""Ranks come together: late ones are waited for as long as the settings say, and named."""

import subprocess
import sys
import time

import pytest
from trainer_harness import free_ports

from pipelinerl_common.errors import FatalError
from pipelinerl_common.settings.roles import TrainerSettings
from pipelinerl_trainer.ranks import RankPlacement, join_ranks

PROGRAM = """
import sys
from pipelinerl_common.settings.roles import TrainerSettings
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from pipelinerl_trainer.ranks import RankPlacement, join_ranks
rank, port = int(sys.argv[1]), int(sys.argv[2])
settings = TrainerSettings(startup_timeout_seconds=120, collective_timeout_seconds=77)
with join_ranks(RankPlacement(rank, 2, rank, "127.0.0.1", port), settings) as ranks:
    of_others = dist.new_group(backend="gloo")
    ranks.limit_collectives()
    limits = [
        group._get_backend(ranks.device).options._timeout.total_seconds()
        for group in (dist.group.WORLD, of_others, ranks._control)
    ]
    total = ranks.gather([float(rank)]).sum().item()
print(total, *limits)
"""


@pytest.fixture
def tcp_port() -> int:
    return int(free_ports(1)[0])


def start(rank: int, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, str(rank), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_rank_that_does_not_come_is_named_with_the_setting(tcp_port: int) -> None:
    settings = TrainerSettings(startup_timeout_seconds=1)
    place = RankPlacement(0, 3, 0, "127.0.0.1", tcp_port)
    began = time.monotonic()
    with (
        pytest.raises(FatalError, match=r"ranks 1, 2 did not join.*startupTimeoutSeconds"),
        join_ranks(place, settings),
    ):
        pass
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_waited_for_and_collectives_have_the_limit_of_the_settings(
    late: int, tcp_port: int
) -> None:
    first = start(1 - late, tcp_port)
    time.sleep(4)
    second = start(late, tcp_port)
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    for output in outputs:
        total, of_all, of_others, control = map(float, output.splitlines()[-1].split())
        assert total == 1.0
        assert (of_all, of_others, control) == (77.0, 77.0, 1800.0)
