"""`pipelinerl calibrate`: U(h) of a generator, measured."""
