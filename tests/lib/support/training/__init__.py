"""Training runs and programs that tests compare."""
