"""Provides samples in memory, counts of the bytes that are read, and damage to data files."""
