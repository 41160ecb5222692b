"""`pipelinerl bench`: measures the product's own paths against baselines, as ratios within one run
on one machine.
"""
