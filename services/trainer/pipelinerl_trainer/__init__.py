"""The trainer: DeepSpeed loop, losses, weight publication, checkpoints."""
