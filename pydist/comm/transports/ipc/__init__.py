"""Ranks of one machine that write into the memory of each other's devices."""
