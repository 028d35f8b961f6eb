"""The command ``mmnnx completion``: a script that completes the options of all commands in a shell."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

import tyro
from tyro.conf import subcommand

from mmnnx.exit_status import MISTAKE
from mmnnx.inspect.schedule_cli import ScheduleConfig
from mmnnx.launch.cli import WAYS
from mmnnx.output import Level
from mmnnx.plan.cli import PlanConfig
from mmnnx.train.checkpoint.inspect_cli import InspectConfig
from mmnnx.train.config import TrainConfig
from mmnnx.train.eval_cli import EvalConfig
from mmnnx.train.export_cli import ExportConfig
from mmnnx.train.generate_cli import GenerateConfig

Shell = Literal["bash", "zsh"]
SHELLS = get_args(Shell)


@dataclasses.dataclass(frozen=True)
class CompletionConfig:
    """Print a script that completes commands and options in a shell."""

    shell: tyro.conf.Positional[Shell]


CONFIGS: dict[str, type[Any]] = {
    "train": TrainConfig,
    "export": ExportConfig,
    "eval": EvalConfig,
    "generate": GenerateConfig,
    "inspect": InspectConfig,
    "schedule": ScheduleConfig,
    "plan": PlanConfig,
    "completion": CompletionConfig,
}

USAGE = """usage: mmnnx completion bash|zsh

Prints a script for the shell to complete the commands of mmnnx and their options. To have it in every bash:

  mmnnx completion bash > ~/.local/share/bash-completion/completions/mmnnx

and in every zsh, a folder of its $fpath:

  mmnnx completion zsh > ~/.zfunc/_mmnnx"""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx completion`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0; 2 for a mistake in the options.
    """
    if options in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(options) != 1 or options[0] not in SHELLS:
        print_error(f"completion is for one of {', '.join(SHELLS)}: mmnnx completion bash")
        return MISTAKE
    script, status = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(script):
            tyro.cli(_commands(), args=["--tyro-print-completion", options[0]], prog="mmnnx")
    except SystemExit as done:
        status = int(done.code or 0)
    for line in script.getvalue().splitlines():
        print(_mended(line))
    return status


def _mended(line: str) -> str:
    """A line of what tyro writes: it would offer the second line of a help text as if it were an option, and
    no files where an option does not ask for them, but a command does."""
    if line.startswith("COMPLETION_SPEC = "):
        return line.replace("\\n", " ")
    if line.startswith("complete -F "):
        return line.replace("complete -F", "complete -o default -F")
    if line.strip().startswith('COMPREPLY=("$'):
        return f"{line}; [[ -n $completions ]] || COMPREPLY=()"
    return line


def _commands() -> Any:
    """All commands as one type, as tyro takes subcommands."""
    ways = functools.reduce(
        operator.or_, (Annotated[_with_output(way), subcommand(option)] for option, way in WAYS.items())
    )
    found = [
        Annotated[_with_output(config, pairs=name == "train"), subcommand(name)]
        for name, config in CONFIGS.items()
    ]
    return functools.reduce(operator.or_, [*found, Annotated[ways, subcommand("launch")]])


def _with_output(config: type[Any], *, pairs: bool = False) -> Any:
    """The options of a command, with those that all commands have (`mmnnx.output`)."""
    without: Any = tyro.conf.FlagCreatePairsOff
    added = [("quiet", without[bool], False), ("log_level", Level, "warning")]
    whole = dataclasses.make_dataclass(config.__name__, added, bases=(config,), frozen=True, kw_only=True)
    return whole if pairs else without[whole]
