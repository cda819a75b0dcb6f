"""Hunter: random training programs, run whole and split, compared, and made small.

A program is a list of Python statements that one device and a mesh can both run. `generator` makes
one from a seed, `world` gives the statements their names, `judge` runs and compares, `shrink` makes
a failing program small, `hunt` is the command (`tools/hunt`).
"""
