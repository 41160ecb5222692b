"""The preprocessor: ledger, reference log-probs, advantages, packing, the Admission and Batches
services.
"""
