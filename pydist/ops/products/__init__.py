"""Operators that contract dims: matmul, einsum, linear layers."""
