"""Train a model: `python train.py --help`."""

import sys

from shardwise.cli import train

if __name__ == "__main__":
    sys.exit(train())
