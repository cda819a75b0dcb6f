"""The gradient reducer: means of gradients over all ranks, in full or partitioned (ZeRO-1)."""
