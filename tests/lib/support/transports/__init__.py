"""Checks the contract of every transport, on the host and between CUDA devices."""
