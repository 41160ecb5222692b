"""Tasks that come with PipelineRL."""
