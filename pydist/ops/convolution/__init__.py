"""Convolutions and transposed ones: by correction, on the shard, or from gathered inputs."""
