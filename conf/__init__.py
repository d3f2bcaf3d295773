"""The configuration groups, installed as the package `shardwise.conf` (`pkg://shardwise.conf` for Hydra)."""
