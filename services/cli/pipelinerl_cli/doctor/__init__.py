"""Advice on a run or a job: the bottleneck, what to turn, and the numbers that say so."""
