"""Whether the ranks of a job can meet: host name, interfaces and ports."""

import os
import socket
import time

import psutil

from shardwise.doctor.findings import Findings

SLOW_SECONDS = 1.0
"""How long a look-up of the own name may take."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_name(found: Findings) -> None:
    """What this machine's name resolves to: gloo binds there, unless a variable names an interface."""
    name, start = socket.gethostname(), time.monotonic()
    addresses: list[str] = []
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        found.facts["network"] = {"host": name, "addresses": []}
        text = (
            f"{name} does not resolve ({error.strerror or error}): gloo falls back to loopback, and hosts cannot meet"
        )
        found.problem("host name", text, _name_it(name))
        return
    seconds = time.monotonic() - start
    found.facts["network"] = {"host": name, "addresses": addresses}
    shown = f"{name} is {', '.join(addresses[:3])}"
    foreign = [address for address in addresses if not _is_own(address)]
    if foreign and not os.environ.get("GLOO_SOCKET_IFNAME"):
        text = f"{shown}: {foreign[0]} is none of this machine's addresses, and gloo cannot bind there"
        found.problem("host name", text, _name_it(name))
    elif seconds > SLOW_SECONDS:
        fix = f"add {name} to /etc/hosts, or mend the name servers in /etc/resolv.conf"
        found.problem("host name", f"{shown}, but the look-up took {seconds:.1f} s: so does every connection", fix)
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        found.ok("host name", f"{shown}: fine for one machine; for several: export GLOO_SOCKET_IFNAME={_outward()}")
    else:
        found.ok("host name", shown)


def _name_it(name: str) -> str:
    return f"add a line '127.0.0.1 {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME={_outward()}"


def _is_own(address: str) -> bool:
    """Whether a socket can be bound to an address."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def _outward() -> str:
    """The first interface that is up and leads somewhere; loopback if there is none."""
    stats = psutil.net_if_stats()
    names = [name for name, stat in stats.items() if stat.isup and not name.startswith(("lo", "docker", "veth", "br-"))]
    return names[0] if names else "lo"


def interfaces(found: Findings) -> None:
    """The network interfaces that are up, and whether those that variables name are there."""
    stats = {name: stat for name, stat in psutil.net_if_stats().items() if stat.isup}
    found.facts.setdefault("interfaces", {name: stat.speed for name, stat in stats.items()})
    shown = ", ".join(f"{name} {stat.speed} Mbit/s" if stat.speed else name for name, stat in sorted(stats.items()))
    wrong = False
    for variable in INTERFACES:
        value = os.environ.get(variable, "")
        if variable.startswith("GLOO"):  # by their whole names; NCCL's list is of beginnings, or of what to leave out
            missing = [one for one in value.split(",") if one and one not in stats]
        else:
            names = [] if value.startswith("^") else [part.split(":")[0] for part in value.lstrip("=").split(",")]
            missing = [one for one in names if not any(have.startswith(one) for have in stats)]
        if missing:
            wrong = True
            fix = f"export {variable}={_outward()}, or unset {variable}"
            found.problem("interfaces", f"{variable}={value}: {missing[0]} is not here or not up ({shown})", fix)
    if not wrong:
        found.ok("interfaces", shown)


def ports(found: Findings) -> None:
    """Whether free ports can be had on loopback, and a connection made there: ranks of one machine meet so."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=3):
                pass
    except OSError as error:
        fix = "bring loopback up (ip link set lo up), or let a firewall or sandbox admit connections to 127.0.0.1"
        found.problem("ports", f"no connection over a free port of 127.0.0.1 ({error.strerror or error})", fix)
        return
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        found.ok("ports", "a free one can be had")
        return
    text = f"free ones can be had ({low} to {high})"
    if high - low < 1000:
        fix = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        found.note("ports", f"{text}: few for many ranks", fix)
    else:
        found.ok("ports", text)
