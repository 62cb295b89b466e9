"""p2pavg averages gradients between PyTorch processes that share nothing but the internet."""

from __future__ import annotations

__version__ = "0.1.0"
