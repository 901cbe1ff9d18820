"""Stands in for DeepEP, its branch for HybridEP included; see tests/deep_ep_doubles.py."""

from .elastic import ElasticBuffer
from .hybrid_ep_buffer import HybridEPBuffer

__all__ = ["ElasticBuffer", "HybridEPBuffer"]
