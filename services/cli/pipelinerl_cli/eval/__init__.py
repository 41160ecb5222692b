"""`pipelinerl eval CHECKPOINT JOB`: pass@k of saved weights."""
