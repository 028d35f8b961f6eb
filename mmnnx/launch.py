"""The command ``mmnnx launch``: prints what to run on each host. It starts nothing and needs no devices."""

from __future__ import annotations

import dataclasses
import ipaddress
import shlex
from collections.abc import Callable, Sequence

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """Print what to run on each host to start one process there: mmnnx launch OPTIONS -- COMMAND.

    COMMAND is "train" with its options, or any program that calls mm.initialize(): "python script.py".
    """

    hosts: tuple[str, ...]
    """Names or addresses of the hosts, by which they reach each other. The first one coordinates."""
    port: int = 7733
    """TCP port on the first host at which the processes find each other."""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx launch`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0; 2 for a mistake in the options.
    """
    own = list(options)
    command: list[str] = []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    parsed = tyro.cli(Options, args=own, prog="mmnnx launch")
    if not command:
        print_error("nothing to launch: give the command after --, as in: mmnnx launch --hosts a b -- train")
        return 2
    if not 0 < parsed.port < 65536:
        print_error(f"--port {parsed.port} is no TCP port: give one from 1 to 65535")
        return 2
    if not parsed.hosts or "" in parsed.hosts:
        print_error("--hosts needs the name or address of at least one host")
        return 2
    for host in parsed.hosts:
        try:
            ipaddress.IPv6Address(host if ":" in host else "::")
        except ValueError:
            print_error(f"--hosts {host} is neither a name nor an IPv6 address: give the port by --port")
            return 2
    for host, line in zip(parsed.hosts, lines(parsed.hosts, parsed.port, command)):
        print(f"# on {host}\n{line}")
    print(
        f"# Port {parsed.port} of {parsed.hosts[0]}, and the ports by which processes send each other "
        "arrays, let in anyone who can reach them: keep them closed to the outside (docs/processes.md)."
    )
    return 0


def lines(hosts: Sequence[str], port: int, command: Sequence[str]) -> list[str]:
    """The shell command of each host.

    >>> lines(["a", "b"], 7733, ["train", "--stages", "4"])[1]
    'JAX_COORDINATOR_ADDRESS=a:7733 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 mmnnx train --stages 4'
    """
    first = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    arguments = ["mmnnx", *command] if command[0] == "train" else command
    shared = f"JAX_COORDINATOR_ADDRESS={shlex.quote(f'{first}:{port}')} JAX_NUM_PROCESSES={len(hosts)}"
    return [f"{shared} JAX_PROCESS_ID={n} {shlex.join(arguments)}" for n in range(len(hosts))]
