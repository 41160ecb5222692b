"""`python -m pipelinerl_actor.prepare`: fetches or makes a job's model before the services start."""
