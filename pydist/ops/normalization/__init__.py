"""Normalization layers with global statistics."""
