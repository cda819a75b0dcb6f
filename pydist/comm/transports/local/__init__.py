"""Implements the transport between threads of one process."""
