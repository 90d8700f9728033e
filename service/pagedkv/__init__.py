"""A paged KV cache with attention, served over gRPC."""

__version__ = "0.1.0"
