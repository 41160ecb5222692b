"""The actor: a rollout loop and the generator behind three HTTP endpoints."""
