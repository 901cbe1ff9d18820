"""Grouped GEMM on a CPU, under TE's rules."""
