"""`pipelinerl new-task NAME`: a task and a job to start one's own from."""
