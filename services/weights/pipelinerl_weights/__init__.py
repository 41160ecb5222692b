"""The weight transfer's data plane: manifest, buckets, process group, sender, receiver.

`manifest` and `errors` import no torch; `group`, `sender` and `receiver` do.
"""
