"""The command line: `pipelinerl up`, watch, report, compare, doctor, simulate, plan and others."""
