"""What every rank does and has, measured on each logging step and brought together in one collective."""
