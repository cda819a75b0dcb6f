"""Poolings: maxima and averages of windows, adaptive ones, and unpooling."""
