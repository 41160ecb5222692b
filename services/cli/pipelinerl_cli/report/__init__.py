"""`pipelinerl report`: report.html, one file without dependencies."""
