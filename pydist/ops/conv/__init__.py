"""Convolves and transposes convolutions: by correction, on the shard, or on gathered inputs."""
