"""Processes that tests start: their environment (`children`), their hangs, and `programs`."""
