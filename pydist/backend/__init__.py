"""Kernels that compute on one shard, and the autotuner that chooses among them."""
