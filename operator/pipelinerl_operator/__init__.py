"""The operator: turns every PipelineRLJob of a cluster into pods, and coordinates its weights."""
