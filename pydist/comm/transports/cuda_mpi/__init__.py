"""Implements the transport over a CUDA-aware MPI, with one CUDA device per rank."""
