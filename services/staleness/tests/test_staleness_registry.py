"""Policies by name and their parameters."""

import ast
import inspect
import sys
from itertools import pairwise
from typing import Any

import pytest
from staleness_fakes import policy_of

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


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("trl", {"eta": -1}, "eta=-1 must be a whole number of at least 0"),
        ("trl", {"eta": True}, "eta=True"),
        ("trl", {"slots": "row"}, "slots='row' must be one of group, trajectory"),
        ("verl_drop", {"eta": 0}, "eta=0 must be a whole number of at least 1"),
        ("verl_wait", {"num_warmup_batches": float("nan")}, "num_warmup_batches=nan"),
        ("openrlhf", {"async_queue_size": 0}, "async_queue_size=0"),
        ("slime", {"prefetch_factor": 0}, "prefetch_factor=0 must be a number above 0"),
        (
            "prime_rl",
            {"min_inflight": 9, "max_inflight": 8},
            "max_inflight=8 must be a whole number of at least 9",
        ),
        ("layered", {"layer2": 1}, "layer2=1 must be true or false"),
        ("slack", {"stream": "yes"}, "stream='yes'"),
        ("roll", {"rho": 0.5}, "rho=0.5"),
    ],
)
def test_refused(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy_settings(name, parameters)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "skyrl",
            {"max_staleness_steps": 1, "num_workers": 5},
            "num_workers=5 must be between the 2 groups of a step and 4",
        ),
        (
            "nemo_in_order",
            {"eta": 2, "max_buffered_rollouts": 5},
            "max_buffered_rollouts=5 must be at least 6",
        ),
        ("slack", {"c_idle": 1}, "c_idle=1 must be at least the 2"),
        ("prime_rl", {"max_ready": 1}, "max_ready=1 must be at least the 2"),
    ],
)
def test_refused_for_the_batch(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(name, **parameters)


def test_every_parameter_has_a_documented_meaning() -> None:
    for settings_type in POLICIES.values():
        for ancestor in settings_type.__mro__[:-2]:
            tree = ast.parse(inspect.getsource(sys.modules[ancestor.__module__]))
            body = next(
                node
                for node in tree.body
                if isinstance(node, ast.ClassDef) and node.name == ancestor.__name__
            ).body
            for field, after in pairwise(body):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(after, ast.Expr), (
                        f"{ancestor.__name__}: {ast.unparse(field)} has no docstring"
                    )


def test_batch_policies_do_not_stream() -> None:
    policy = policy_of("areal")
    assert not policy.streams
    with pytest.raises(NotImplementedError, match="take"):
        policy.take_next(0)
