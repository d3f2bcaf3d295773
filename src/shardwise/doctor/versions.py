"""Whether the packages that are installed are those that this one asks for, and none of them is known to be bad."""

import platform
import shlex
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from shardwise.doctor.findings import Findings

COMPROMISED = {"pytorch-lightning": ("2.6.2", "2.6.3"), "lightning": ("2.6.2", "2.6.3")}
"""Releases that stole credentials."""
NAMED = ("torch", "pytorch-lightning", "hydra-core", "wandb", "torchvision", "numpy")
"""Packages whose versions are told; the others are told where something is wrong."""


def packages(found: Findings) -> None:
    """Python, and every requirement of this package: is it there, and in its range?"""
    wanted, present = requirements(), installed()
    found.facts["python"] = platform.python_version()
    found.facts["versions"] = {name: present[name] for name in sorted({one.name for one in wanted} & set(present))}
    wrong = []
    for name, bad in COMPROMISED.items():
        if present.get(name) in bad:
            wrong.append(name)
            fix = (
                f"pip uninstall {name}, then install {_word(wanted, name)}; change every key and token on this machine"
            )
            found.problem("packages", f"{name} {present[name]} is a compromised release, which stole credentials", fix)
    for one in wanted:
        version = present.get(one.name)
        if one.name in wrong or (version is not None and one.specifier.contains(version, prereleases=True)):
            continue
        wrong.append(one.name)
        have = "is not installed" if version is None else f"{version} is installed, {one.specifier} is needed"
        found.problem("packages", f"{one.name} {have}", f"pip install {shlex.quote(f'{one.name}{one.specifier}')}")
    if not wrong:
        shown = ", ".join(f"{name} {present[name]}" for name in NAMED if name in present)
        found.ok("packages", f"all {len(wanted)} as needed: Python {platform.python_version()}, {shown}")


def _word(wanted: list[Requirement], name: str) -> str:
    """What to hand to pip for a package of which a release is bad."""
    return next((shlex.quote(str(one)) for one in wanted if one.name == name), f"another release of {name}")


def requirements(package: str = "shardwise") -> list[Requirement]:
    """What an installed package asks for on this machine, without its extras."""
    wanted = []
    for text in metadata.requires(package) or []:
        try:
            one = Requirement(text)
        except InvalidRequirement:
            continue
        one.name = canonicalize_name(one.name)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            wanted.append(one)
    return wanted


def installed() -> dict[str, str]:
    """Name -> version of every installed package, in the canonical form of names."""
    present: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:
            present.setdefault(canonicalize_name(name), one.version)
    return present
