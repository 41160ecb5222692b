"""What the preprocessor counts. Names are those of the run's metrics."""

import re
from collections import Counter

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MAX_REASONS = 48


class Counters:
    """Totals since this process started. Reasons come partly from actors, so their number is bounded."""

    def __init__(self) -> None:
        self.tokens_received = 0
        self.groups_trained = 0
        self.sequences_masked = 0
        self.sequences_overlong = 0
        self._dropped_groups: Counter[str] = Counter()
        self._dropped_tokens: Counter[str] = Counter()

    def dropped(self, reason: str, num_tokens: int) -> None:
        """A group ended untrained, having cost `num_tokens` sampled tokens."""
        reason = self._known(reason)
        self._dropped_groups[reason] += 1
        self._dropped_tokens[reason] += num_tokens

    def wasted(self, reason: str, num_tokens: int) -> None:
        """Sampled tokens were thrown away though their group is counted elsewhere or lives on."""
        self._dropped_tokens[self._known(reason)] += num_tokens

    def _known(self, reason: str) -> str:
        if reason in self._dropped_tokens:
            return reason
        return reason if _REASON.fullmatch(reason) and len(self._dropped_tokens) < _MAX_REASONS else "other"

    def values(self) -> dict[str, float]:
        totals = {
            "tokens_received_total": self.tokens_received,
            "groups_trained_total": self.groups_trained,
            "sequences_masked_total": self.sequences_masked,
            "sequences_overlong_total": self.sequences_overlong,
        }
        groups = {f"dropped_{reason}_groups_total": count for reason, count in self._dropped_groups.items()}
        tokens = {f"dropped_{reason}_tokens_total": count for reason, count in self._dropped_tokens.items()}
        return {name: float(value) for name, value in {**totals, **groups, **tokens}.items()}
