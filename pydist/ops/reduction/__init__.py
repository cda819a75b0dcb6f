"""Sums, extremes, norms and losses over any dims; softmax, scans and sorts along one dim."""
