"""The command line: `pydist data`, `train`, `profile`, `run` and `demo`."""
