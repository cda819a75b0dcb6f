"""The command line: `pydist data`, `train`, `profile`, `run`, `demo` and others."""
