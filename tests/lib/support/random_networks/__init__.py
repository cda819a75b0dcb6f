"""Random networks: blocks that fit where they stand, chains of them, and hypothesis cases.

`spot` says where a block stands, `layers` and `expressions` write its source there, `blocks` runs
that source, `chains` puts blocks together, and `cases` makes whole networks with loss and split.
"""
