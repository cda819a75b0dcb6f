"""Stand-ins: what takes the place of a device, and what it shows (docs/stand-ins.md)."""
