"""Pools to averages and maxima, adaptively or not, and inverts maximum pooling."""
