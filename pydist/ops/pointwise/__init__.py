"""Element-wise operators on shards, and random numbers keyed by position."""
