"""Ranks with a CUDA device each, connected by NCCL."""
