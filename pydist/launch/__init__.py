"""Launches jobs: starts ranks with or without MPI, watches them, ends all when one fails.

Nothing in this package imports torch, so that `pydist run` starts quickly.
"""
