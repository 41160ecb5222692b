"""`spec.staleness`: the staleness policy by name, with that policy's own parameters beside it."""

import re
from typing import Any

from pydantic import ConfigDict, model_validator
from pydantic.alias_generators import to_camel

from pipelinerl_common.settings.base import Settings
from pipelinerl_common.words import did_you_mean
from pipelinerl_staleness.policy import PolicySettings
from pipelinerl_staleness.registry import POLICIES, parse_policy_settings


class StalenessSettings(Settings):
    """`{policy: areal, eta: 2}`. Which parameters exist depends on the policy; unknown ones are
    refused.
    """

    model_config = ConfigDict(extra="allow")

    policy: str = "areal"
    """Name of the staleness policy."""

    @model_validator(mode="after")
    def _known(self) -> "StalenessSettings":
        self.parse()
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The policy's own parameters, by their snake_case names. Raises ValueError for one that is
        given in both spellings.
        """
        names = (
            {to_camel(name): name for name in POLICIES[self.policy].parameter_names()}
            if self.policy in POLICIES
            else {}
        )
        extra = self.model_extra or {}
        for camel, name in names.items():
            if camel != name and {camel, name} <= extra.keys():
                raise ValueError(
                    f"{camel}={extra[camel]!r} and {name}={extra[name]!r} are one parameter: give "
                    "it once"
                )
        return {names.get(key, key): value for key, value in extra.items()}

    def parse(self) -> PolicySettings:
        """The policy's own frozen settings. Raises ValueError that names the parameter, spelt as
        here, and what is allowed.
        """
        parameters = self.parameters
        try:
            return parse_policy_settings(self.policy, parameters)
        except ValueError as error:
            if self.policy not in POLICIES:
                raise ValueError(f"{error}{did_you_mean(self.policy, POLICIES)}") from error
            names, message = POLICIES[self.policy].parameter_names(), str(error)
            for name in names:
                message = re.sub(rf"\b{name}\b", to_camel(name), message)
            unknown = sorted(parameters.keys() - set(names))[:1]
            hints = [did_you_mean(name, map(to_camel, names)) for name in unknown]
            raise ValueError("".join([message, *hints])) from error
