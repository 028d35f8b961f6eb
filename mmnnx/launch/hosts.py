"""``mmnnx launch --hosts``: a shell line for each host."""

from __future__ import annotations

import dataclasses
import ipaddress
import shlex
from collections.abc import Sequence

from mmnnx.launch.command import arguments, check_name, check_train
from mmnnx.train.errors import UserError


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Print what to run on each host to start one process there: mmnnx launch --hosts HOST ... -- COMMAND.

    COMMAND is "train" with its options, or any program that calls mm.initialize(): "python script.py".
    """

    hosts: tuple[str, ...]
    """Names or addresses of the hosts, by which they reach each other. The first one coordinates."""
    port: int = 7733
    """TCP port on the first host at which the processes find each other."""

    def write(self, command: Sequence[str]) -> str:
        """The shell lines. Raises UserError for what are no hosts, no port, and impossible options."""
        if not 0 < self.port < 65536:
            raise UserError(f"--port {self.port} is no TCP port: give one from 1 to 65535")
        if not self.hosts or "" in self.hosts:
            raise UserError("--hosts needs the name or address of at least one host")
        for host in self.hosts:
            _check(host)
        check_train(command, len(self.hosts), None)
        text = [f"# on {host}\n{line}" for host, line in zip(self.hosts, self.lines(command))]
        text.append(
            f"# Port {self.port} of {self.hosts[0]}, and the ports by which processes send each other "
            "arrays, let in anyone who can reach them: keep them closed to the outside (docs/processes.md).\n"
        )
        return "\n".join(text)

    def lines(self, command: Sequence[str]) -> list[str]:
        """The shell command of each host.

        >>> Hosts(("a", "b")).lines(["train", "--stages", "4"])[1]
        'JAX_COORDINATOR_ADDRESS=a:7733 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 mmnnx train --stages 4'
        """
        first = f"[{self.hosts[0]}]" if ":" in self.hosts[0] else self.hosts[0]
        count = len(self.hosts)
        shared = f"JAX_COORDINATOR_ADDRESS={shlex.quote(f'{first}:{self.port}')} JAX_NUM_PROCESSES={count}"
        line = shlex.join(arguments(command))
        return [f"{shared} JAX_PROCESS_ID={n} {line}" for n in range(count)]


def _check(host: str) -> None:
    """Raises UserError for what is neither a name nor an IP address."""
    if ":" not in host:
        return check_name("hosts", host, r"\w([\w.-]*\w)?", "node1 node2.example 10.0.0.3")
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise UserError(
            f"--hosts {host} is neither a name nor an IPv6 address: give the port by --port"
        ) from None
