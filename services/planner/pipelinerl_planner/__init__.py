"""Planning without hardware: throughput model, simulator of asynchronous training, lengths, cost
models, controllers.
"""
