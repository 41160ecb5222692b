"""`pipelinerl watch DIR|JOB`: live numbers."""
