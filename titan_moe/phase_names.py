"""The phases of a step (phases.py measures them). Imports no torch: the report reads them too."""

OTHER = "other"

OWN = ("embedding", "norms", "attention", "dense", "router", "experts", "shared_expert", "mtp", "loss")
"""Of forward and backward: what a rank does without waiting for others"""
SHARED = ("dispatch", "combine", "fsdp")
"""Of forward and backward: what ranks do together, so that each waits for the slowest"""
OUTSIDE = ("validation", "checkpoint", "profile")
"""Once in a while, and no part of training: their time counts neither as a step's nor against the throughput"""
WHOLE = ("data", "graph", "clip", "optimizer", "pipeline", "wgrad", "logging", *OUTSIDE, OTHER)
"""Told without forward and backward"""

NAMES = (*(f"{name}.{way}" for name in (*OWN, *SHARED) for way in ("forward", "backward")), *WHOLE)
"""All phases, on every rank the same, whatever it computes"""
