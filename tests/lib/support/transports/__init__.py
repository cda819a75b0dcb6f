"""Contracts: what every transport must do, on the host and between CUDA devices."""
