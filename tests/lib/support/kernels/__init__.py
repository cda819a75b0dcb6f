"""Cases for the native kernels, and their runs with every instruction set."""
