"""Convolution and transposed convolution: by correction, on the shard, or on gathered inputs."""
