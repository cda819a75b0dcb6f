"""Processes that tests start: environment (`children`), hangs (`hangs`), and `programs`."""
