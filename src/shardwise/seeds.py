"""Seeds that are the same in every process and on every machine (Python's ``hash`` is salted)."""

import hashlib


def stable_seed(*parts: object) -> int:
    """A seed in [0, 2**63) from the parts, by SHA-256 of their texts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
