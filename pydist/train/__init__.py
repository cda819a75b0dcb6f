"""Training: the loop, its configuration, checkpoints, and what a run leaves behind.

`pydist.train.run.train` is the whole walk; its parts are usable on their own.
"""
