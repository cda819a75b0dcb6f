"""Data sets: counts of the bytes read, and damage to their files."""
