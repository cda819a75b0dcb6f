"""Runs of pydist's commands that are killed at any instant; `tools/kills` starts them."""
