"""The command line: ``mmnnx`` itself, and ``mmnnx schedule``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.inspect.schedules import by_name
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.schedule import read_schedule, schedule_names
from mmnnx.options import reported
from mmnnx.output import Output, saying, take_options
from mmnnx.train.progress import Display
from tests.environment import environment
from tests.slow import all_but, few


@pytest.fixture(autouse=True)
def no_columns(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)


def schedule(capsys, options: str = "") -> list[str]:
    """The lines that ``mmnnx schedule`` prints."""
    assert main(["schedule", *options.split()]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    return [line.rstrip() for line in out.split("\n")]


def table(lines: list[str]) -> dict[str, list[str]]:
    """The rows of the table, in their order."""
    first = next(n for n, line in enumerate(lines) if "schedule" in line) + 2
    rows = lines[first : lines.index("", first)]
    return {name: cells for name, *cells in map(str.split, rows)}


def drawn(lines: list[str]) -> list[str]:
    """The names of the schedules drawn."""
    return [lines[n - 1] for n, line in enumerate(lines) if line.startswith("mesh0 ")]


def numbers(name: str, meshes: int, microbatches: int, interleave: int = 2, costs=UNIT_COSTS) -> list[float]:
    """Stages per mesh, step time, step latency, bubble in % and peak activations."""
    one = by_name(name, meshes, microbatches, interleave, costs)
    line = one.timeline
    return [one.stages_per_mesh, line.period, line.makespan, 100 * line.bubble, max(one.memory)]


def test_usage(capsys):
    assert main(["--help"]) == 0
    out, errors = capsys.readouterr()
    for command in ("train", "launch", "inspect", "schedule"):
        assert f"mmnnx {command}" in out and f"\n  {command} " in out
    assert not errors
    assert main([]) == 2
    assert "usage: mmnnx" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["schedule", "--help"])
    out, errors = capsys.readouterr()
    assert "--interleave" in out and "\n  --log-level LEVEL  print" in out and not errors
    assert main(["fly"]) == 2
    out, errors = capsys.readouterr()
    assert errors == "mmnnx: there is no command 'fly': `mmnnx --help` lists them\n" and not out
    assert main(["trian"]) == 2
    assert "'trian' (did you mean 'train'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["train", "--st\x1b[31meps", "3"],
        ["train", "--schedule", "\x1b[31m"],
        ["launch", "--slurm", "--nodes", "2", "--gpus-per-node", "1", "--", "train", "\x1b[31m"],
        ["launch", "--slurm", "--gpus-per-node", "1", "--nodes", "\x1b[31m", "--", "train"],
        ["schedule", "a file \x1b[31m\x07"],
    ],
    ids=lambda options: options[0],
)
def test_a_control_character_in_a_mistake_is_named_and_not_printed(options, capsys, monkeypatch):
    """A name of a file may have one, and a shell puts in the names of files."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit, match="2"):
        main(options)
    out, errors = capsys.readouterr()
    assert not out and r"\x1b[31m" in errors and errors.replace("\n", "").isprintable()


def test_a_control_character_may_be_in_a_value(capsys):
    assert main(["inspect", "a\x07b"]) == 2
    assert r"a\x07b" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmnnx {mm.__version__}\n" == f"mmnnx {version('mmnnx')}\n"


def test_colours(capsys, monkeypatch):
    """Only on terminals, and NO_COLOR turns them off there."""
    colour = re.compile(r"\x1b\[[\d;]*\b(3|4|9|10)\d\b[\d;]*m")
    options = ["schedule", "--stages", "2", "--microbatches", "2", "--schedule", "1f1b"]
    for variables, coloured in (({}, False), ({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(options) == 0
        assert bool(colour.search(capsys.readouterr().out)) == coloured, variables


@pytest.mark.slow
@few(1)
@pytest.mark.parametrize("variables, coloured", [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_of_help_on_a_terminal(variables, coloured):
    """What parses the options has another variable for it."""
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "mmnnx", "schedule", "--help"]
    run = subprocess.Popen(
        command, stdout=other, stderr=other, env=environment() | {"TERM": "xterm"} | variables
    )
    os.close(other)
    said = b""
    with contextlib.suppress(OSError):  # at the end, on Linux
        while found := os.read(terminal, 65536):
            said += found
    os.close(terminal)
    assert run.wait(60) == 0 and b"--microbatches" in said
    assert (b"\x1b[" in said) == coloured


def test_quiet(capsys, monkeypatch):
    """Progress is left out, and results are not; before or after the command, and not in a launched one."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    sizes = ["--stages", "2", "--microbatches", "2"]
    assert main(["schedule", *sizes]) == 0
    assert "simulating gpipe" in capsys.readouterr().out
    for args in (["--quiet", "schedule", *sizes], ["schedule", *sizes, "--quiet"]):
        assert main(args) == 0
        out = capsys.readouterr().out
        assert "simulating" not in out and "gpipe" in out
    assert main(["launch", "--hosts", "a", "--", "python", "script.py", "--quiet"]) == 0
    assert "script.py --quiet" in capsys.readouterr().out


def test_quiet_progress(capsys):
    for quiet in (False, True):
        with saying(Output(quiet=quiet)), Display(steps=1) as display:
            display.step(1, loss=1.0, tokens_per_second=1.0)
        assert capsys.readouterr().out == ("" if quiet else "step 1/1  loss 1.0000  1 tokens/s  ? left\n")


def test_log_level(capsys):
    logger = logging.getLogger("mmnnx.some.module")
    for level in (None, "info", "error"):
        with saying(Output(log_level=level)):
            logger.info("compiled \x1b[31mit")
            logger.error("no")
        said = capsys.readouterr().err
        assert ("mmnnx: INFO: compiled \\x1b[31mit\n" in said) == (level == "info")
        assert ("mmnnx: ERROR: no\n" in said) == (level is not None)
    assert take_options(["train", "--log-level=info", "--quiet", "--", "--quiet"]) == (
        Output(True, "info"),
        ["train", "--", "--quiet"],
    )
    assert take_options([*Output(True, "debug").arguments, "train"]) == (Output(True, "debug"), ["train"])
    assert not logger.isEnabledFor(logging.INFO)
    for args in (["--quiet"], ["--log-level", "info"]):
        assert main(args) == 2
        assert capsys.readouterr().err.startswith("usage: mmnnx")
    assert main(["schedule", "--log-level", "loud"]) == 2
    assert "--log-level is one of debug, info, warning, error, not 'loud'" in capsys.readouterr().err


@pytest.mark.slow
def test_no_space_for_the_output():
    command = [sys.executable, "-m", "mmnnx", "schedule", "--stages", "2", "--microbatches", "2"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60
        )
    assert found.returncode == 2
    assert found.stderr == "mmnnx: the output cannot be written: no space is left on its device\n"


def test_ctrl_c(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mmnnx.inspect.schedule_cli.run", interrupted)
    assert main(["schedule"]) == 130
    assert capsys.readouterr().err == "mmnnx: stopped\n"


@pytest.mark.slow
def test_completion(capsys):
    """bash, asked for what may come next."""
    assert main(["completion", "bash"]) == 0
    asked = """
        next() {
            COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _tyro_mmnnx; echo "${COMPREPLY[@]}"
        }
        next mmnnx s; next mmnnx train --st; next mmnnx train --sch; next mmnnx train --precision b
        next mmnnx launch --slurm --gpus; next mmnnx comp; next mmnnx eval --q
        next mmnnx launch --hosts --log-level e; next mmnnx schedule --no; next mmnnx train --no-r
        next mmnnx inspect run
    """
    script = capsys.readouterr().out + asked
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "schedule",
        "--steps --stages",
        "--schedule",
        "bfloat16",
        "--gpus-per-node",
        "completion",
        "--quiet",
        "error",
        "",  # it has flags, and none has an opposite
        "--no-resume --no-remat",
        "",  # where the shell offers files
    ], done.stderr
    script += "next mmnnx inspect run; echo ${#COMPREPLY[@]}; complete -p mmnnx"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-2:] == ["0", "complete -o default -F _tyro_mmnnx mmnnx"], done.stderr
    assert main(["completion", "fish"]) == 2
    assert "one of bash, zsh" in capsys.readouterr().err


@pytest.mark.parametrize("options", all_but(["--help"], ["--help", "schedule --stages 2 --microbatches 2"]))
def test_nobody_reads_the_rest(options):
    """As of `mmnnx --help | head -0`: no traceback."""
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "mmnnx", *options.split()],
        env=environment,
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_files_that_are_not_there_and_output_that_nobody_reads():
    """An error of a file is said in a line; one of the output is for `main`, which knows what it means."""
    said: list[str] = []

    def into_nothing():
        read, write = os.pipe()
        os.close(read)
        return os.write(write, b"x")

    assert reported(lambda: len(Path("none.txt").read_text()), said.append) == 2
    assert said == ["none.txt: No such file or directory"]
    assert reported(lambda: int("x"), said.append, ValueError) == 2 and "invalid literal" in said[1]
    with pytest.raises(BrokenPipeError):
        reported(into_nothing, said.append, ValueError)
    assert len(said) == 2


def test_the_table_says_what_simulation_says(capsys):
    found = table(schedule(capsys, "--stages 3 --microbatches 9 --interleave 3"))
    assert set(found) == set(schedule_names())
    for name, cells in found.items():
        shown = [float(cell.rstrip("%")) for cell in cells]
        assert shown == pytest.approx(numbers(name, 3, 9, 3), abs=0.051), name
    assert list(found) == sorted(
        found, key=lambda name: (float(found[name][1]), float(found[name][4]), schedule_names().index(name))
    )


def test_costs(capsys):
    costs = {"forward": 2.0, "backward": 4.5, "backward-input": 3.0, "backward-weight": 1.5}
    options = "--schedule 1f1b --forward 2 --backward-input 3 --backward-weight 1.5"
    (cells,) = table(schedule(capsys, options)).values()
    assert [float(cell.rstrip("%")) for cell in cells] == pytest.approx(
        numbers("1f1b", 4, 8, costs=costs), abs=0.051
    )


def test_one_schedule_written_out(capsys):
    lines = schedule(capsys, "--stages 2 --microbatches 3 --schedule 1f1b")
    assert [line for line in lines if line] == [
        "              stages   step      step                   peak",
        " schedule   per mesh   time   latency   bubble   activations",
        " ───────────────────────────────────────────────────────────",
        " 1f1b              1     12        12    25.0%             2",
        "step time: steady state, from one step to the next; step latency: one step on its own; "
        "bubble: share of the step time in",
        "which a mesh runs nothing; peak activations: the most saved activations on a mesh, in microbatches.",
        "1f1b",
        "mesh0 F0F1    B0--F2B1--  B2--",
        "mesh1   F0B0--F1B1--F2B2--",
        "F forward  B backward  blank: bubble, 25.0%; steady-state step time 12 units",
        "peak activations of each mesh: 2 1",
    ]


def test_draws_the_shortest_or_all(capsys):
    lines = schedule(capsys)
    shortest = min(schedule_names(), key=lambda name: by_name(name, 4, 8, 2, UNIT_COSTS).rank)
    assert drawn(lines) == [shortest] == list(table(lines))[:1]
    lines = schedule(capsys, "--all --stages 2 --microbatches 4")
    assert drawn(lines) == list(table(lines)) and len(drawn(lines)) == len(schedule_names())


def test_a_schedule_that_refuses_says_why(capsys):
    lines = schedule(capsys, "--stages 4 --microbatches 3")
    with pytest.raises(ValueError) as error:
        by_name("dualpipe-v", 4, 3, 2, UNIT_COSTS)
    assert str(error.value) in lines
    assert set(table(lines)) == set(schedule_names()) - {"dualpipe-v"}


@pytest.mark.parametrize("columns", [None, 80, 60, 20])
def test_lines_fit(columns, capsys, monkeypatch):
    """On a narrow terminal all but the table, which keeps its columns."""
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    lines = schedule(capsys, "--all --stages 8 --microbatches 5")  # some refuse
    assert max(map(len, lines)) <= max(columns or 120, 80)
    end = next(n for n, line in enumerate(lines) if line.startswith("step time"))
    assert max(map(len, lines[end:])) <= max(columns or 120, 60)
    cells = [float(cell.rstrip("%")) for cell in table(lines)["gpipe"]]
    assert cells == pytest.approx(numbers("gpipe", 8, 5), abs=0.051)


def test_csv_written_and_read(capsys):
    schedule(capsys, "--stages 3 --microbatches 6 --schedule zbv --csv it.csv")
    assert read_schedule("it.csv") == by_name("zbv", 3, 6, 2, UNIT_COSTS).table
    lines = schedule(capsys, "--schedule it.csv")
    (cells,) = table(lines).values()
    assert [float(cell.rstrip("%")) for cell in cells] == pytest.approx(numbers("zbv", 3, 6), abs=0.051)
    assert drawn(lines) == ["it.csv"]


def test_the_shortest_is_saved(capsys):
    lines = schedule(capsys, "--stages 2 --microbatches 4 --save it.json --csv it.csv")
    (name,) = drawn(lines)
    one = by_name(name, 2, 4, 2, UNIT_COSTS)
    assert lines[-3:] == ["wrote it.csv", "wrote it.json", ""]
    assert read_schedule("it.csv") == one.table
    with open("it.json") as file:
        slices = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(one.timeline.events)


def test_mistakes_are_told_in_one_line(capsys, tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0X0\n")
    (tmp_path / "cut.csv").write_text("0F0,0B0,0F1\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\0")
    for options, says in {
        "--schedule 2f2b": "unknown schedule '2f2b'; there are '1f1b'",
        "--schedule dualpipe-v --microbatches 3": "at least 8 here; there are 3",
        "--schedule none.csv": "none.csv: No such file",
        "--schedule bad.csv": "bad.csv, row 1, column 2: '0X0' is no action",
        "--schedule cut.csv": "backward of microbatch 1 on stage 0 is missing",
        "--schedule binary.csv": "binary.csv: this is not UTF-8 text",
        "--stages 0": "--stages 0 must be at least 1",
        "--microbatches -2": "--microbatches -2 must be at least 1",
        "--interleave 0": "--interleave 0 must be at least 1",
        "--forward nan": "--forward nan must be a time",
        "--backward-weight -1": "--backward-weight -1 must be a time",
        "--forward 0 --backward-input 0 --backward-weight 0": "nothing takes time",
        "--all --schedule 1f1b": "give one of them",
        "--all --csv it.csv": "--csv writes one schedule",
        "--all --save it.svg": "--save writes one schedule",
        "--save it.bmp": "it.bmp: the file name must end in .svg",
        "--save missing/it.svg": "missing/it.svg: No such file",
    }.items():
        assert main(["schedule", *options.split()]) == 2, options
        errors = capsys.readouterr().err
        assert says in errors
        assert errors.startswith("mmnnx: ") and errors.count("\n") == 1


@pytest.mark.parametrize("options", ["--stages many", "--colour red", "--forward"])
def test_options_that_make_no_sense(options, capsys):
    with pytest.raises(SystemExit) as error:
        main(["schedule", *options.split()])
    assert error.value.code == 2
    assert options.split()[0] in capsys.readouterr().err


def test_the_process_needs_no_devices():
    """JAX fails here as soon as it looks for devices."""
    done = subprocess.run(
        [sys.executable, "-m", "mmnnx", "schedule", "--stages", "2", "--microbatches", "2"],
        env=os.environ | {"JAX_PLATFORMS": "nowhere", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "mesh1 " in done.stdout and "\x1b" not in done.stdout and done.stderr == ""
