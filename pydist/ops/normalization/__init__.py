"""Norms, with statistics of the whole: one core, and what each kind shares."""
