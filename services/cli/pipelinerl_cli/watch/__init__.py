"""`pipelinerl watch`: the numbers of a run, or of a job in a cluster, in the terminal."""
