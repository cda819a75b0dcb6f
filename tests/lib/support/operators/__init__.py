"""Every function that pydist handles, called once: its text, its run, and docs/operators.md."""
