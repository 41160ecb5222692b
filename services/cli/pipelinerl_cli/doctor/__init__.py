"""Advice on a run or a job: the bottleneck, which setting to change, and the numbers behind it."""
