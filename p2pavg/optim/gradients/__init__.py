"""Gradients in flat buffers: where they accumulate, and their way to the rounds and back.

Start reading at `flat`.
"""
