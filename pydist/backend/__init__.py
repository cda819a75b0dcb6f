"""What computes on one shard: the library kernels to choose from, and the choice."""
