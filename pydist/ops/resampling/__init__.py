"""Interpolation, padding, shifts: each output reads a few known inputs."""
