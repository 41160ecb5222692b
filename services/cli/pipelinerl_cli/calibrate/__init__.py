"""U(h) of a generator, measured: tokens per second with 1, 2, 4, ... requests at once."""
