"""Named algorithms and the compositions that make no sense."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import AlgorithmSettings, parse_job
from pipelinerl_common.settings.algorithm import (
    PRESETS,
    ExperimentalSettings,
    Loss,
    _warn_moved,
)


def algorithm(**options: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(options)


def test_every_name_has_a_preset_that_makes_sense() -> None:
    assert set(get_args(Loss)) == set(PRESETS)
    for name in PRESETS:
        assert algorithm(loss=name).loss == name


@pytest.mark.parametrize("dumped", [{"exclude_none": True}, {}])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_after_it_was_written_out(name: str, dumped: dict[str, Any]) -> None:
    settings = algorithm(loss=name)
    assert algorithm(**settings.model_dump(mode="json", by_alias=True, **dumped)) == settings


def test_the_presets_are_those_of_their_papers() -> None:
    fields = {
        "surrogate",
        "importance",
        "truncation",
        "clip_low",
        "clip_high",
        "baseline",
        "divide_by_std",
        "normalize_by",
    }
    table = {
        name: tuple(algorithm(loss=name).model_dump(include=fields).values()) for name in PRESETS
    }
    assert table == {
        "reinforce": ("score", "token", 5.0, 0, 0, "leave_one_out", False, "sequences"),
        "ppo": ("clip", "token", 0, 0.2, 0.2, "value", False, "tokens"),
        "grpo": ("clip", "token", 0, 0.2, 0.2, "mean", True, "sequence_means"),
        "dr_grpo": ("clip", "token", 0, 0.2, 0.2, "mean", False, "max_tokens"),
        "dapo": ("clip", "token", 0, 0.2, 0.28, "mean", True, "tokens"),
        "gspo": ("clip", "geometric", 0, 3e-4, 4e-4, "mean", True, "sequence_means"),
        "cispo": ("score", "token", 5.0, 0, 0, "mean", True, "tokens"),
        "rloo": ("score", "sequence", 5.0, 0, 0, "leave_one_out", False, "sequences"),
    }
    assert [name for name in PRESETS if algorithm(loss=name).drop_zero_advantage] == ["dapo"]
    assert algorithm(loss="ppo").gae_lambda == 0.95


def test_what_is_set_by_hand_wins_over_the_preset_and_what_follows_from_it_is_set_too() -> None:
    assert algorithm(loss="grpo", divideByStd=False, clipHigh=0.3).clip_high == 0.3
    assert algorithm(importance="none").truncation == 0
    assert algorithm(surrogate="clip").clip_low == 0.2
    assert algorithm(loss="ppo", baseline="mean").gae_lambda == 1.0
    assert algorithm(truncation=0).truncation == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"surrogate": "clip", "importance": "none"}, ["importance=none", "set importance=token"]),
        (
            {"loss": "ppo", "clipHigh": 0},
            ["surrogate=clip (loss=ppo) needs both bounds, but clipHigh=0.0: set it above 0"],
        ),
        (
            {"loss": "grpo", "truncation": 4},
            ["truncation=4.0 has no effect with surrogate=clip (loss=grpo): remove it, or"],
        ),
        ({"loss": "grpo", "truncationLow": 0.5}, ["truncationLow=0.5", "set surrogate=score"]),
        ({"loss": "grpo", "outside": "mask"}, ["outside=mask", "set surrogate=score"]),
        (
            {"clipLow": 0.1},
            [
                "clipLow=0.1 has no effect with surrogate=score (loss=reinforce): remove it",
                "truncation",
            ],
        ),
        (
            {"clipLow": 0.1, "clipHigh": 0.2},
            ["clipLow=0.1 and clipHigh=0.2 have no effect", "remove them"],
        ),
        ({"clipLow": 0.1, "surrogate": "score"}, ["with surrogate=score: remove it"]),
        ({"loss": "cispo", "clipHigh": 0.1}, ["clipHigh=0.1", "set surrogate=clip"]),
        (
            {"importance": "none", "truncation": 5},
            ["importance=none has no weight for truncation=5.0 to bound: remove it"],
        ),
        ({"truncation": 2, "truncationLow": 2}, ["truncationLow=2.0", "below truncation=2.0"]),
        ({"outside": "mask", "truncation": 0}, ["outside=mask", "set truncation or truncationLow"]),
        (
            {"loss": "grpo", "baseline": "value"},
            ["divideByStd=true (loss=grpo)", "baseline=value", "divideByStd=false"],
        ),
        (
            {"loss": "dapo", "baseline": "none"},
            ["dropZeroAdvantage=true", "baseline=none", "baseline=mean"],
        ),
        (
            {"gaeLambda": 0.9},
            [
                "gaeLambda=0.9 has no effect",
                "baseline=leave_one_out (loss=reinforce)",
                "set baseline=value",
            ],
        ),
        ({"loss": "rloo", "discount": 0.9}, ["discount=0.9", "set baseline=value"]),
        ({"loss": "ppo", "valueCoefficient": 0}, ["valueCoefficient=0", "baseline=value"]),
        (
            {"loss": "ppo", "experimental": {"gradientMixing": 0.3}},
            ["gradientMixing=0.3", "surrogate=clip"],
        ),
        (
            {"importance": "none", "experimental": {"gradientMixing": 0.3}},
            ["gradientMixing=0.3", "importance=none"],
        ),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1"}},
            ["kl.estimator=k1", "kl.placement=reward", "k2"],
        ),
    ],
)
def test_a_senseless_composition_is_refused_with_what_to_set(
    options: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(ValidationError) as refused:
        algorithm(**options)
    for part in says:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "ppo"])
def test_a_baseline_of_the_group_needs_a_group(name: str) -> None:
    spec = {
        "model": {"uri": "tiny://arithmetic"},
        "task": {"path": "a:B", "groupSize": 1},
        "algorithm": {"loss": name},
    }
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    with pytest.raises(SettingsError, match=r"groupSize of at least 2, not 1"):
        parse_job(document, "x")


@pytest.mark.parametrize(
    ("old", "experimental", "named"),
    [
        ({"gradientMixing": 0.3}, {"gradient_mixing": 0.3}, "algorithm.gradientMixing"),
        (
            {"optimizer": {"delay_compensation": 0.5, "eps": 1e-6}},
            {"delay_compensation": 0.5},
            "algorithm.optimizer.delayCompensation",
        ),
        (
            {"gradientMixing": 0.0, "experimental": {"gradientMixing": 2.0}},
            {"gradient_mixing": 2.0},
            None,  # the default that an older schema has filled in
        ),
    ],
)
def test_experimental_switches_are_read_from_their_old_places_with_a_warning(
    old: dict[str, Any],
    experimental: dict[str, float],
    named: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_moved.cache_clear()
    settings = AlgorithmSettings.model_validate(old)
    assert settings.experimental == ExperimentalSettings(**experimental)
    assert AlgorithmSettings.model_validate(old) == settings
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (named is not None)
    assert named is None or f"spec.{named} has moved: write spec.algorithm.exp" in found[0]
    assert "delay" not in str(settings.optimizer)


@pytest.mark.parametrize(
    ("both", "named"),
    [
        ({"gradientMixing": 0.3, "experimental": {"gradient_mixing": 0.3}}, "gradientMixing=0.3"),
        (
            {
                "optimizer": {"delayCompensation": 1},
                "experimental": {"delayCompensation": 2},
            },
            "optimizer.delayCompensation=1",
        ),
    ],
)
def test_an_experimental_switch_in_both_places_is_refused(both: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"{named} and experimental.* remove the first"):
        AlgorithmSettings.model_validate(both)


@pytest.mark.parametrize(
    "wrong",
    [{"gradientMixing": False}, {"optimizer": {"delayCompensation": -1}}, {"experimental": 3}],
)
def test_wrong_values_in_old_places_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="experimental"):
        AlgorithmSettings.model_validate(wrong)
