"""What the preprocessor counts while it works."""

import re
from collections.abc import Sequence

from pipelinerl_common.metrics import Metrics
from pipelinerl_preprocessor.drops import LAYERS
from pipelinerl_preprocessor.groups import Group

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Counters:
    """Totals since this process started. Reasons come partly from actors; what is not one word is
    counted as `other`.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.tokens_received = metrics.counter("tokens_received_total")
        self.leases_granted = metrics.counter("leases_granted_total")
        self._groups_trained = metrics.counter("groups_trained_total")
        self._staleness = metrics.histogram("staleness_steps")
        self.sequences_masked = metrics.counter("sequences_masked_total")
        self.sequences_overlong = metrics.counter("sequences_overlong_total")
        self._dropped_groups = metrics.counter("groups_dropped_total")
        self._dropped_samples = metrics.counter("samples_dropped_total")
        self._dropped_tokens = metrics.counter("tokens_dropped_total")
        self._stale_groups = metrics.counter("stale_groups_total")
        self._stale_tokens = metrics.counter("stale_tokens_total")

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """`groups` were trained in `step`. The versions of a group that came before a restart are
        not known any more.
        """
        self._groups_trained.inc(len(groups))
        for group in groups:
            if group.first_versions:
                self._staleness.observe(max(0, step - min(group.first_versions)))

    def dropped(self, reason: str, num_tokens: int, num_samples: int) -> None:
        """A group ended untrained, having cost `num_tokens` sampled tokens in `num_samples`
        finished trajectories.
        """
        self._dropped_groups.inc(reason=_word(reason))
        self._dropped_samples.inc(num_samples, reason=_word(reason))
        if reason in LAYERS:
            self._stale_groups.inc(layer=LAYERS[reason])
        self.wasted(reason, num_tokens)

    def wasted(self, reason: str, num_tokens: int) -> None:
        """Sampled tokens were thrown away; their group is counted elsewhere, or lives on."""
        self._dropped_tokens.inc(num_tokens, reason=_word(reason))
        if reason in LAYERS:
            self._stale_tokens.inc(num_tokens, layer=LAYERS[reason])


def _word(reason: str) -> str:
    return reason if _REASON.fullmatch(reason) else "other"
