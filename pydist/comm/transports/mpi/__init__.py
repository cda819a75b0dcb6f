"""Ranks that are MPI processes, for tensors in host memory."""
