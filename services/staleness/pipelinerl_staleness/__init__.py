"""Staleness policies: pure state machines, standard library only."""
