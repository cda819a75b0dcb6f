"""Random networks: blocks that fit their input, chains of them, and hypothesis cases.

`spot` describes the input of a block, `layers` and `expressions` write its source, `blocks` runs
that source, `chains` joins blocks, and `cases` makes full networks with loss and split.
"""
