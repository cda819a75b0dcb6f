"""Data sets: how much of them is read, and what happens to their files."""
