"""Reduces dims to sums, extremes, norms and losses; scans and sorts along one dim."""
