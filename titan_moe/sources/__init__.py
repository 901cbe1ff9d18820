"""Where documents come from: one file per kind of source; `listing.py` finds out which kind a name stands for."""
