"""Implements the command line: `pydist data`, `train`, `profile`, `run`, `demo` and others."""
