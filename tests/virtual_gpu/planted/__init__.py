"""Planted faults: small mutations of kernels and host code, each of which the tests must notice."""
