"""Generates random training programs, runs them on one device and split, and compares the runs.

A program is a list of Python statements that one device and a mesh can both run. `generator`
generates it from a seed, `world` provides the names in its statements, `judge` runs and compares,
`shrink` minimizes a failing program, `hunt` and `command` implement `tools/hunt`.
"""
