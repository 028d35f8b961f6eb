"""What a type checker knows of a function that mm.jit was given, it knows of what it gives back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mmnnx
from mmnnx.mpmd.jit import jit

PROGRAM = """
from collections.abc import Callable

import mmnnx as mm

@mm.jit
def plain(x: int, *, scale: float = 1.0) -> str:
    return ""

@mm.jit(static_argnums=0, donate_argnames=("y",))
def decorated(x: int, y: bytes) -> list[str]:
    return []

class Model:
    @mm.jit
    def step(self, x: int, scale: float = 1.0) -> bytes:
        return b""

    @mm.jit(graph=False)
    def other(self, x: int) -> str:
        return ""

def given(fun: Callable[[int], bool]) -> None:
    reveal_type(mm.jit(fun, device=None)(1))  # bool

reveal_type(plain(1, scale=2.0))  # str
reveal_type(plain.eval_shape(1))  # str
plain("a")  # error: Argument 1
plain(1, size=2)  # error: Unexpected keyword argument "size"
reveal_type(decorated(1, b""))  # list[str]
decorated(1)  # error: Missing positional argument "y"
reveal_type(Model().step(1, scale=2.0))  # bytes
Model().step("a")  # error: Argument 1
reveal_type(Model.step(Model(), 1))  # bytes
reveal_type(Model().other(1))  # str
reveal_type(plain.lower(1).compile())  # Compiled
mm.jit(plain, donate_argnum=0)  # error: Unexpected keyword argument "donate_argnum"
mm.jit(3)  # error: No overload variant
"""


def test_signatures(tmp_path):
    """mypy reads the program and mm.jit alone: what these import may be anything."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    files = [path, mmnnx.__file__, jit.__file__, str(Path(jit.__file__).with_name("stage_objects.py"))]
    options = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path}", "--hide-error-context"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files)],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(Path(mmnnx.__file__).parent.parent)},
    )
    said: dict[int, list[str]] = {}
    for number, text in re.findall(r"program\.py:(\d+): (.*)", run.stdout):
        said.setdefault(int(number), []).append(text)
    for number, line in enumerate(PROGRAM.split("\n"), 1):
        code, _, expected = line.partition("  # ")
        if "reveal_type" in code:
            (found,) = said.pop(number)
            found = found.replace("builtins.", "")
            assert re.fullmatch(rf'note: Revealed type is "([\w.]+\.)?{re.escape(expected)}"', found), found
        elif expected:
            assert said.pop(number)[0].startswith(expected), run.stdout
    assert not said and (Path(mmnnx.__file__).parent / "py.typed").exists(), run.stdout
