"""Trains many times for one question, with a table and a figure at the end.

`runs` starts the runs, several at a time, and continues a study that was stopped; `sample_size`
compares whole samples with sub-volumes of them; `sweep` varies the settings of one configuration.
"""
