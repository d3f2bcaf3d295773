"""Weights alone: out of a checkpoint into plain files, and back in."""
