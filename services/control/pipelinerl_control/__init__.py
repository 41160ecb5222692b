"""What a job's controller needs wherever the job runs: `pipelinerl up` and the operator share it."""
