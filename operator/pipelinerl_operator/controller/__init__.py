"""The controller: from PipelineRLJobs to pods, and from what became of them to status."""
