"""Streams, links, frames: what moves bytes between two peers."""
