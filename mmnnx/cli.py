"""The command ``mmnnx``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

USAGE = """usage: mmnnx train [OPTIONS]
       mmnnx launch --hosts HOST ...|--slurm|--gke|--tpu-pod NAME ... -- COMMAND
       mmnnx export RUN FOLDER
       mmnnx generate RUN|FOLDER --prompt TEXT
       mmnnx eval RUN|FOLDER --data PATH
       mmnnx inspect PATH
       mmnnx schedule [OPTIONS]
       mmnnx plan --target CHIP:TOPOLOGY [OPTIONS]

Commands:
  train     train or fine-tune a language model as a pipeline over devices, in one process or several
  export    write the model of a run as a folder of the Hugging Face hub
  eval      print the loss of a run or a published model on text
  generate  print what the model of a run, or a published one, writes after a prompt
  launch    print what starts the processes of a run: on hosts, by Slurm, on GKE, on a Cloud TPU slice
  inspect   show what a checkpoint holds, without loading it
  schedule  compare pipeline schedules: step time, bubble, saved activations; needs no devices
  plan      compile a train step for TPUs or GPUs that are not here: does it fit, how long does it take

`mmnnx COMMAND --help` lists the options of a command."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line ``args`` (default: the process's own).

    Returns the exit status: 0; 1 if a process of several failed; 2 for a mistake in the arguments; 3 if
    training diverged; 130 after Ctrl-C; 143 after SIGTERM.
    """
    command, *options = list(sys.argv[1:] if args is None else args) or [""]
    errors = Console(stderr=True, highlight=False)

    def print_error(text: str) -> None:
        errors.print(f"mmnnx: {text}", markup=False, soft_wrap=True)

    # Each command imports only what it needs.
    if command == "train":
        from mmnnx.train.cli import run as run_train

        return run_train(options, print_error)
    if command == "export":
        from mmnnx.train.export_cli import run as run_export

        return run_export(options, print_error)
    if command == "eval":
        from mmnnx.train.eval_cli import run as run_eval

        return run_eval(options, print_error)
    if command == "generate":
        from mmnnx.train.generate_cli import run as run_generate

        return run_generate(options, print_error)
    if command == "launch":
        from mmnnx.launch.cli import run as run_launch

        return run_launch(options, print_error)
    if command == "inspect":
        from mmnnx.train.checkpoint.inspect_cli import run as run_inspect

        return run_inspect(options, print_error)
    if command == "schedule":
        from mmnnx.inspect.schedule_cli import run as run_schedule

        return run_schedule(options, print_error)
    if command == "plan":
        from mmnnx.plan.cli import run as run_plan

        return run_plan(options, print_error)
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command:
        print_error(f"there is no command {command!r}")
    print(USAGE, file=sys.stderr)
    return 2
