"""Handles Fourier transforms."""
