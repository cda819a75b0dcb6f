"""Normalizes sharded tensors with global statistics."""
