"""The readings since the last look at the balance."""

from pipelinerl_control.scaling.balance import Balance, Counts, balance_between


class Period:
    """Grows with every reading; begins anew when a process came or went, and after each look."""

    def __init__(self) -> None:
        self.balance: Balance | None = None
        """Over the period so far; None before its first step."""
        self._ends: tuple[Counts, Counts] | None = None
        """The first and the newest reading."""

    def begin_anew(self) -> None:
        """With the newest reading."""
        self._ends = None if self._ends is None else (self._ends[1], self._ends[1])
        self.balance = None

    def take(self, counts: Counts | None, last_look: int | None) -> None:
        """A reading, None where there is nothing to count yet. `last_look` is the step of the last
        look.

        Trainers that have gone back to a checkpoint pass that step again: it cannot lie within a
        period.
        """
        if counts is None:
            self._ends = self.balance = None
            return
        begin = (
            self._ends[0] if self._ends is not None and counts.follows(self._ends[1]) else counts
        )
        if last_look is not None and begin.step < last_look <= counts.step:
            begin = counts
        self._ends = (begin, counts)
        self.balance = balance_between(begin, counts)
