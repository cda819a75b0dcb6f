"""Element by element: on the shards as they are, random numbers keyed by position."""
