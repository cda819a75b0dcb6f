"""Implements the transport over NCCL, with one CUDA device per rank."""
