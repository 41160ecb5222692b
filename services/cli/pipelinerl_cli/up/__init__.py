"""`pipelinerl up job.yaml`: the operator's plan, carried out as local processes."""
