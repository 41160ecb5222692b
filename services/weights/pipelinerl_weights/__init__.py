"""The weight transfer's data plane: manifest, buckets, process group, sender, receiver."""
