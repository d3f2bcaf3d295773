"""Checkpoints: one format for every layout, published whole or not at all."""
