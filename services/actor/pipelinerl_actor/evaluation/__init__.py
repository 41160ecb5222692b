"""Evaluation of one set of weights: pass@k with confidence intervals over a task's prompts."""
