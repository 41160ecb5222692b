"""All staleness policies by name. A new one is one class and one line here."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from pipelinerl_staleness.areal import Areal
from pipelinerl_staleness.conventional import Conventional
from pipelinerl_staleness.dressage import Dressage
from pipelinerl_staleness.layered import Layered
from pipelinerl_staleness.nemo import NemoInOrder, NemoReadyFirst, NemoWeightFifo, NemoWindowed
from pipelinerl_staleness.openrlhf import Openrlhf, OpenrlhfArticle
from pipelinerl_staleness.policy import Policy, PolicySettings
from pipelinerl_staleness.prime_rl import PrimeRl
from pipelinerl_staleness.psrl import Psrl
from pipelinerl_staleness.roll import Roll, RollRlvr
from pipelinerl_staleness.skyrl import Skyrl
from pipelinerl_staleness.slack import Slack
from pipelinerl_staleness.slime import Slime
from pipelinerl_staleness.trl import Trl
from pipelinerl_staleness.verl import VerlDrop, VerlWait

_POLICY_TYPES: Mapping[str, type[Policy]] = {
    "areal": Areal,
    "conventional": Conventional,
    "dressage": Dressage,
    "layered": Layered,
    "nemo_in_order": NemoInOrder,
    "nemo_ready_first": NemoReadyFirst,
    "nemo_weight_fifo": NemoWeightFifo,
    "nemo_windowed": NemoWindowed,
    "openrlhf": Openrlhf,
    "openrlhf_article": OpenrlhfArticle,
    "prime_rl": PrimeRl,
    "psrl": Psrl,
    "roll": Roll,
    "roll_rlvr": RollRlvr,
    "skyrl": Skyrl,
    "slack": Slack,
    "slime": Slime,
    "trl": Trl,
    "verl_drop": VerlDrop,
    "verl_wait": VerlWait,
}

POLICIES: Mapping[str, type[PolicySettings]] = {
    name: policy.settings_type for name, policy in _POLICY_TYPES.items()
}
"""Settings type of every policy, by the policy's name."""


def parse_policy_settings(name: str, parameters: Mapping[str, Any]) -> PolicySettings:
    """The settings of policy `name`. Raises ValueError that names what is wrong and what is
    allowed.
    """
    if name not in POLICIES:
        raise ValueError(
            f"unknown staleness policy {name!r}: choose one of {', '.join(sorted(POLICIES))}"
        )
    settings_type = POLICIES[name]
    allowed = settings_type.parameter_names()
    unknown = sorted(set(parameters) - set(allowed))
    if unknown:
        raise ValueError(
            f"policy {name!r} has no parameter {unknown[0]!r}: it has "
            f"{', '.join(allowed) or 'none'}"
        )
    required = [
        f.name
        for f in fields(settings_type)
        if f.default is MISSING and f.default_factory is MISSING
    ]
    missing = [parameter for parameter in required if parameter not in parameters]
    if missing:
        raise ValueError(f"policy {name!r} needs the parameter {missing[0]!r}")
    return settings_type(**parameters)


def name_of(settings: PolicySettings) -> str:
    """The name under which a policy with these settings is registered."""
    return next(name for name, settings_type in POLICIES.items() if settings_type is type(settings))


def make_policy(settings: PolicySettings, groups_per_step: int) -> Policy:
    """A new policy with these settings and `groups_per_step` groups per optimizer step (B)."""
    return _POLICY_TYPES[name_of(settings)](settings, groups_per_step)
