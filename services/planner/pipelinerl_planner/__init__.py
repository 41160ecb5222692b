"""Planning without hardware: the simulator of asynchronous training, lengths, cost models."""
