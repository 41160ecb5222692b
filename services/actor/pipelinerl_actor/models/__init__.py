"""Models: tiny ones made on the spot, and where a job's model comes from."""
