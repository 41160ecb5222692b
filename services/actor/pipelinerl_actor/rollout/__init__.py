"""The rollout loop: leases groups, samples them on the generators, verifies and publishes them."""
