"""Low-precision GEMMs: the formats of each recipe (recipes.py), and tensors put into them (quantize.py)."""
