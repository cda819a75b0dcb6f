"""Ranks that are MPI processes with a CUDA device each, under an MPI that takes its memory."""
