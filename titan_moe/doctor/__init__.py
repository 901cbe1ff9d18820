"""The doctor: is this node, or the allocation of several, fit to train? Works without torchtitan."""
