"""The functions of TE's extension that its ep.py calls."""
