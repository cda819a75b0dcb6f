"""Implements the transport over MPI, for tensors in host memory."""
