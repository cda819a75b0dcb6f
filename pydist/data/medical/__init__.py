"""Converts medical volumes from and to NIfTI, and makes synthetic CT."""
