"""Contracts of every transport, on the host and between CUDA devices."""
