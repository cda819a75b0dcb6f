"""Shapes, slices, joins: the same elements elsewhere."""
