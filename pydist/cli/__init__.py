"""The command line: `pydist data`, `pydist train`, `pydist run`, `pydist demo`."""
