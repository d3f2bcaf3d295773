"""What a machine has for training, how fast it is, and what to fix: ``python -m shardwise doctor``."""
