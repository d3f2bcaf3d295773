"""The experiments and sweeps, installed as the package `shardwise.experiments`."""
