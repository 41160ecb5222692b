"""The operator: which processes a job needs, and the weight-transfer coordinator."""
