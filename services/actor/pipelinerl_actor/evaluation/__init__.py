"""Evaluation of weights: pass@k with confidence intervals over a task's prompts, of one folder or
of a run's checkpoints.
"""
