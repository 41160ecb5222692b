"""The preprocessor: ledger of groups, reference log-probs, advantages, packing, two services."""
