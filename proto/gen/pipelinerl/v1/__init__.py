"""Generated from proto/pipelinerl/v1 by proto/generate; never edited."""
