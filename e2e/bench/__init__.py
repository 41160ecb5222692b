"""Measures the product's own paths against baselines, as ratios within one run on one machine.

Run it as `e2e/bench/run NAME`. A bench is one module with `bench(args) -> Report`; beside them
stand what they share (`report`, `processes`, `trajectories`) and a cluster without nodes for the
operator (`api_server`, `hollow_pods`).
"""
