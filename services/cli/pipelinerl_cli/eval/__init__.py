"""`pipelinerl eval CHECKPOINT TASK`: pass@k of saved weights."""
