"""The sample store: blocks of samples that stay in the memory of the ranks after their first read.

From the second epoch on no file is read: a block goes from the rank that holds it to the rank that
needs it, which has the same part of another sample group's samples. `memory` puts the parts
together: `directory` decides which rank holds what, `entry` is the memory of one block, `source`
makes a batch of entries and files, `figures` counts.
"""
