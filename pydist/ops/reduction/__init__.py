"""Sums, extremes, norms and losses over any dims; softmax and what else goes along one."""
