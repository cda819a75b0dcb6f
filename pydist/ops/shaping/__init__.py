"""Reshaping, slicing, indexing and joining, which move elements without changing them."""
