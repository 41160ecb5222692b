"""Planning without hardware: the throughput model, the simulator of asynchronous training, lengths, cost models, controllers."""
