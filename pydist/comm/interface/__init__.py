"""What every transport is: its operations, and what those that take time return."""
