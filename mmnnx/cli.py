"""The command ``mmnnx``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

import mmnnx
from mmnnx.exit_status import MISTAKE
from mmnnx.output import OPTIONS_OF_ALL, is_output_error, saying, take_options
from mmnnx.printable import printable
from mmnnx.sharding.rules import did_you_mean

LINES = "\n\t"

if os.environ.get("NO_COLOR"):  # tyro, imported later, has a variable of its own
    os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")

COMMANDS = {  # the module of each, which is imported when it runs
    "train": "mmnnx.train.cli",
    "export": "mmnnx.train.export_cli",
    "eval": "mmnnx.train.eval_cli",
    "generate": "mmnnx.train.generate_cli",
    "launch": "mmnnx.launch.cli",
    "inspect": "mmnnx.train.checkpoint.inspect_cli",
    "schedule": "mmnnx.inspect.schedule_cli",
    "plan": "mmnnx.plan.cli",
    "completion": "mmnnx.completion",
}

USAGE = f"""usage: mmnnx train [OPTIONS]
       mmnnx launch --hosts HOST ...|--slurm|--gke|--tpu-pod NAME ... -- COMMAND
       mmnnx export RUN FOLDER
       mmnnx generate RUN|FOLDER --prompt TEXT
       mmnnx eval RUN|FOLDER --data PATH
       mmnnx inspect PATH
       mmnnx schedule [OPTIONS]
       mmnnx plan --target CHIP:TOPOLOGY [OPTIONS]
       mmnnx completion bash|zsh
       mmnnx --version

Commands:
  train     train or fine-tune a language model as a pipeline over devices, in one process or several
  export    write the model of a run as a folder of the Hugging Face hub
  eval      print the loss of a run or a published model on text
  generate  print what the model of a run, or a published one, writes after a prompt
  launch    print what starts the processes of a run: on hosts, by Slurm, on GKE, on a Cloud TPU slice
  inspect   show what a checkpoint holds, without loading it
  schedule  compare pipeline schedules: step time, bubble, saved activations; needs no devices
  plan      compile a train step for TPUs or GPUs that are not here: does it fit, how long does it take
  completion
            print a script that completes commands and options in a shell

{OPTIONS_OF_ALL}

Exit status: 0 done; 1 a process of several failed, or a plan does not fit; 2 a mistake in the arguments, or
in a file that they name; 3 training diverged; 130 stopped by Ctrl-C; 141 nobody reads the output any more;
143 stopped by SIGTERM.

`mmnnx COMMAND --help` lists the options of a command. NO_COLOR=1 in the environment turns colours off."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line ``args`` (default: the process's own).

    Returns the exit status: 0; 1 if a process of several failed, or a plan does not fit; 2 for a mistake in
    the arguments; 3 if training diverged; 130 after Ctrl-C; 141 if nobody reads the output any more; 143
    after SIGTERM. Raises SystemExit for options that cannot be parsed.
    """
    try:
        status = _run(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
        return status
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # As of `mmnnx schedule | head`: nobody reads the rest. (Rich makes a SystemExit of it.)
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not is_output_error(error):
            raise
        _drop_output()
        print("mmnnx: the output cannot be written: no space is left on its device", file=sys.stderr)
        return MISTAKE


def _drop_output() -> None:
    """Has Python not try again to write at its end what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: list[str]) -> int:
    errors = Console(stderr=True, highlight=False, emoji=False)

    def print_error(text: str) -> None:
        errors.print(f"mmnnx: {printable(text, keep=LINES)}", markup=False, soft_wrap=True)

    try:
        output, left = take_options(args)
    except ValueError as error:
        print_error(str(error))
        return MISTAKE
    command, *options = left or [""]
    if command in COMMANDS:
        with saying(output):
            try:
                return importlib.import_module(COMMANDS[command]).run(options, print_error)
            except KeyboardInterrupt:
                print_error("stopped")
                return 130
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"mmnnx {mmnnx.__version__}")
        return 0
    if command:
        near = did_you_mean(command, COMMANDS)
        print_error(f"there is no command {command!r}{near}: `mmnnx --help` lists them")
        return MISTAKE
    print(USAGE, file=sys.stderr)
    return MISTAKE
