"""Attention over tokens: which ranks hold keys and values, and the products on each rank."""
