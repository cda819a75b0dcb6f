"""Provides cases for the native kernels, and runs the kernels with every instruction set."""
