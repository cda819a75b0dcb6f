"""The transport for ranks of one machine that write into each other's device memory."""
