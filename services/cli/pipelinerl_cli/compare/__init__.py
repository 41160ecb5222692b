"""`pipelinerl compare A B [...]`: runs side by side."""
