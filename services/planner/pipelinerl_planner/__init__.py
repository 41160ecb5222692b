"""Planning without hardware, as a library: throughput model, simulator of asynchronous training,
lengths, cost models, controllers.
"""
