"""Boxes that move between ranks as a plan says, and the way back of their gradients."""
