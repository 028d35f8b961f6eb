"""The command that is launched: what `mmnnx train` would refuse on arrival is refused now."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmnnx.options import parse_options
from mmnnx.output import take_options
from mmnnx.train.config import DEVICES, TrainConfig, share_of_devices
from mmnnx.train.errors import UserError


def arguments(command: Sequence[str], cluster: bool = False) -> list[str]:
    """The arguments of a process: those of `command`, after "mmnnx" if it is "train".

    Args:
      cluster: whether `mmnnx train` has to ask JAX for the other processes; a program that calls
        `mm.initialize()` does so anyway.

    >>> arguments(["train", "--stages", "4"], cluster=True)
    ['mmnnx', 'train', '--cluster', '--stages', '4']
    """
    if command[0] != "train":
        return list(command)
    return ["mmnnx", "train", *["--cluster"] * (cluster and "--cluster" not in command), *command[1:]]


def check_train(command: Sequence[str], processes: int, devices: int | None) -> None:
    """Raises UserError for options of "train" that so many processes cannot carry out; other commands pass.

    Options in files (--config, --resume) are not looked at: the files may be elsewhere.

    Args:
      devices: how many each process has; None where that does not matter, or is not known.

    Raises:
      SystemExit: for what are no options of `mmnnx train`.
    """
    if command[0] != "train":
        return
    try:
        _, options = take_options([*command[1:]])
    except ValueError as error:
        raise UserError(str(error)) from None
    config = parse_options(TrainConfig, "train", options, pairs=True)
    if config.processes > 1:
        raise UserError(f"--processes {config.processes} starts processes on one machine: leave it out here")
    if config.config is not None or config.resume:
        return
    config.validate()
    share = share_of_devices(config.devices, processes)
    if devices is not None and share > devices:
        raise UserError(
            f"{config.devices} devices are needed ({DEVICES}), {share} in each of {processes} processes, "
            f"which has {devices}"
        )


def check_counts(**options: int | None) -> None:
    """Raises UserError for a number below 1, by the name of its option."""
    for name, number in options.items():
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} {number} must be at least 1")


def check_name(option: str, value: str | None, pattern: str, example: str) -> None:
    """Raises UserError unless all of `value` matches: what is printed is read by shells and YAML parsers."""
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
        raise UserError(f"--{option} {value!r} will not do: give something like {example}")
