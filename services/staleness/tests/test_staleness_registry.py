"""Policies by name and their parameters."""

from typing import Any

import pytest

from pipelinerl_staleness.areal import Areal, ArealSettings
from pipelinerl_staleness.conventional import Conventional, ConventionalSettings
from pipelinerl_staleness.registry import POLICIES, make_policy, parse_policy_settings


def test_every_policy_is_made_from_its_own_settings() -> None:
    nemo = {f"nemo_{sampler}" for sampler in ("windowed", "weight_fifo", "ready_first", "in_order")}
    others = {
        "areal",
        "conventional",
        "dressage",
        "layered",
        "prime_rl",
        "psrl",
        "skyrl",
        "slack",
        "slime",
        "trl",
    }
    assert set(POLICIES) == nemo | others | {
        "openrlhf",
        "openrlhf_article",
        "roll",
        "roll_rlvr",
        "verl_drop",
        "verl_wait",
    }
    assert isinstance(make_policy(ArealSettings(), 4), Areal)
    assert isinstance(make_policy(ConventionalSettings(), 4), Conventional)


def test_settings_are_parsed_by_name() -> None:
    assert parse_policy_settings("areal", {"eta": 3}) == ArealSettings(eta=3)
    assert parse_policy_settings("conventional", {}) == ConventionalSettings(steps_per_generation=1)


@pytest.mark.parametrize(
    ("name", "parameters", "match"),
    [
        ("arael", {}, "unknown staleness policy 'arael': choose one of areal, conventional"),
        (
            "areal",
            {"etta": 1},
            "policy 'areal' has no parameter 'etta': it has eta, max_concurrent",
        ),
        ("areal", {"eta": -1}, "eta=-1"),
        ("areal", {"eta": True}, "eta=True"),
        ("areal", {"eta": "2"}, "eta='2'"),
        ("areal", {"eta": 1.5}, "eta=1.5"),
        ("areal", {"max_concurrent": 0}, "max_concurrent=0"),
        ("conventional", {"steps_per_generation": 0}, "steps_per_generation=0"),
    ],
)
def test_wrong_parameters_name_what_is_allowed(
    name: str, parameters: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        parse_policy_settings(name, parameters)
