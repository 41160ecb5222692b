"""The command line: pipelinerl up, compare, bench."""
