"""Interpolation, padding and shifts, whose outputs each read a few known inputs."""
