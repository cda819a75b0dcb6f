"""Plans exchanges of boxes between ranks, their adjoints, and consistency checks."""
