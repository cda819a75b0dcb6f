"""Stand-ins: replacements for devices, and what they show (docs/stand-ins.md)."""
