"""Times and sizes as a person reads them."""

import math


def shown_bytes(number: float) -> str:
    """``2.1 GiB``, ``640 MiB``, ``5.8 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.2g} {unit}" if abs(number) < 9.5 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB" if number < 1024 else f"{number / 1024:.1f} TiB"


def shown_seconds(seconds: float) -> str:
    """How long something took: ``4.1 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def shown_ms(seconds: float) -> str:
    """A time of a step: ``1.24 s``, ``31 ms``, ``1.2 ms``, ``0.03 ms``."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds >= 1:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 9.5 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"
