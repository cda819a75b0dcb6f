"""Applies element-wise operators to shards, and draws random numbers keyed by position."""
