"""What probes find: rows for a person and facts for a program. A probe that fails or hangs becomes a row too."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROBE_SECONDS = 10.0
"""How long one probe may take: a name server, a network disk or a driver may never answer."""


@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    name: str
    state: str
    """ok, note (it may be meant) or problem (training would fail, or be much slower than it has to be)."""
    text: str
    fix: str = ""
    """What to do about it, in one line; always there for a problem."""


@dataclass
class Findings:
    """Rows and facts of one probe, or of all of them."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def ok(self, name: str, text: str) -> None:
        self.rows.append(Row(name, "ok", text))

    def note(self, name: str, text: str, fix: str = "") -> None:
        self.rows.append(Row(name, "note", text, fix))

    def problem(self, name: str, text: str, fix: str) -> None:
        self.rows.append(Row(name, "problem", text, fix))


Probe = Callable[[Findings], None]


def look(probes: Mapping[str, Probe], *, seconds: float = PROBE_SECONDS) -> Findings:
    """Run probes one after the other; never raises, and takes at most ``seconds`` for each.

    Args:
        probes: name, for the row of a probe that does not come to its end, -> what looks and tells.
        seconds: limit of one of them.
    """
    every = Findings()
    for name, probe in probes.items():
        found = Findings()

        def run(probe: Probe = probe, found: Findings = found, name: str = name) -> None:
            try:
                probe(found)
            except Exception as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                found.note(name, f"could not be looked at ({why[:200]})")

        thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
        thread.start()
        thread.join(seconds)
        every.rows += list(found.rows)
        every.facts |= dict(found.facts)
        if thread.is_alive():
            fix = "find out what hangs there: a name server, a network disk, or a driver"
            every.problem(name, f"gave no answer within {seconds:g} s", fix)
    return every
