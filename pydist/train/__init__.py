"""Trains networks: the loop, its configuration, checkpoints, and the files of a run.

`pydist.train.run.train` performs a complete run; its parts are usable on their own.
"""
