"""The rollout loop: leases groups, samples them from the generators, verifies them, publishes them."""
