"""One call of every function that pydist handles: as text, its run, and docs/operators.md."""
