"""The waiting rule that keeps a bound without dropping: versions are used up oldest first."""

from pipelinerl_staleness.groups import Groups


def take_oldest_class(groups: Groups, needed: int) -> list[str] | int:
    """`needed` ready groups from the oldest stamps, in dispatch order within a stamp; or the stamp
    that must be waited for.

    A younger stamp is touched only when every group of the older ones is in the batch, so a class
    smaller than a batch is completed from the next one instead of stalling for ever.
    """
    chosen: list[str] = []
    ready = groups.ready_by_stamp()
    for stamp in sorted({*groups.num_running_by_stamp, *groups.ready.values()}):
        chosen += [group for group in ready if groups.ready[group] == stamp][: needed - len(chosen)]
        if len(chosen) == needed:
            return chosen
        if stamp in groups.num_running_by_stamp:
            return stamp
    return chosen
