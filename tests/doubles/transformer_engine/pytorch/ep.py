"""Expert parallelism over gloo, under TE's rules."""
