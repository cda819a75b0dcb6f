"""The sample store: blocks of samples that stay on the ranks after their first read.

From the second epoch on no file is read: a block goes from the rank that holds it to the rank that
needs it, which has the same part of another sample group's samples. `memory` puts the parts
together: `options` are the settings, `directory` decides which rank holds what, `form` and `entry`
are the memory of one block, `holdings` are a rank's own blocks, `disk` those beyond its memory, in
the files of `spill` or, for the next run, `lasting`; `delivery` has the messages of a batch,
`source` makes it of entries and files, `figures` counts.
"""
