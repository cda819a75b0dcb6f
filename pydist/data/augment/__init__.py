"""Augments samples by blocks: each rank reads and computes its block of the augmented sample."""
