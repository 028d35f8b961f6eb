"""The package: what its import costs, what it exports, and its description on an index."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mmnnx as mm
from tests.environment import environment

ROOT = Path(__file__).parent.parent
SLOW = (
    "jax",
    "scipy",
    "matplotlib",
    "grain",
    "orbax",
    "tensorstore",
    "tyro",
    "rich",
    "optax",
    "fsspec",
    "pyarrow",
)


def python(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_import_is_light():
    """`import mmnnx` imports no package but its own; mm.jit what Flax has imported, and no heavy one."""
    assert python(f"import sys, mmnnx; print([m for m in {SLOW} if m in sys.modules])") == "[]\n"
    later = "('scipy', 'matplotlib', 'grain', 'orbax', 'tensorstore', 'tyro', 'fsspec', 'pyarrow')"
    assert python(f"import sys, mmnnx; mmnnx.jit; print([m for m in {later} if m in sys.modules])") == "[]\n"


def test_commands_need_no_optional_package():
    """A package of an extra is imported where it is used: whoever installed mmnnx alone can run commands."""
    extras = "('safetensors', 'tokenizers', 'jinja2', 'pyarrow', 'gcsfs', 'tensorboardX', 'wandb', 'libtpu')"
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({extras}))
from mmnnx.cli import COMMANDS
print([importlib.import_module(module).run.__name__ for module in COMMANDS.values()])
"""
    assert python(program) == str(["run"] * 9) + "\n"


@pytest.mark.slow
def test_a_package_of_the_same_name_as_a_function():
    """`mm.plan` is the function, whatever was imported before."""
    assert (
        python("import mmnnx.plan.cli; print(callable(mmnnx.plan), mmnnx.target.__name__)") == "True target\n"
    )


def test_exports():
    """Type checkers see the names that are there, and each is what its module has."""
    tree = ast.parse((ROOT / "mmnnx/__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {a.name for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    packages = {"inspect", "modules", "mpmd", "sharding"}
    assert seen - packages == set(mm.__all__) - {"plan"} and packages <= seen
    assert {name for names in mm._HOMES.values() for name in names} == seen - packages
    for name in [*mm.__all__, *packages]:
        assert getattr(mm, name) is not None and name in dir(mm)
    with pytest.raises(AttributeError, match="module 'mmnnx' has no attribute 'jitt'"):
        print(mm.jitt)


def test_the_citation_is_of_this_version():
    assert f"\nversion: {mm.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_published_models_say_what_they_need():
    program = """
import sys
sys.modules["safetensors"] = None
try:
    from mmnnx.modules import hf
except ImportError as error:
    print(error)
"""
    assert python(program).startswith('mmnnx.modules.hf needs more packages: pip install "mmnnx[hf]" (')


def readme_of_an_index() -> str:
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_an_index_shows_no_link_that_leads_nowhere():
    """Links by paths of the repository become those paths, pictures are left out, programs stay."""
    before, after = (ROOT / "README.md").read_text(encoding="utf-8"), readme_of_an_index()
    assert "](docs/" in before
    code = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
    assert code.findall(after) == code.findall(before)
    prose = code.sub("", after)
    targets = re.findall(r"\]\(([^)\s]*)", prose) + re.findall(
        r"^\[[^\]]+\]: *(\S+)", prose, flags=re.MULTILINE
    )
    targets += re.findall(r"""(?:src|href)=["']([^"']*)""", prose)
    assert all(target.startswith("https://") for target in targets), targets


@pytest.mark.slow
def test_a_notebook_needs_nothing_but_the_object():
    """What draws a mesh is imported when it is asked for."""
    made = "mm.MultiMesh(axis_sizes=(1,), axis_names=('stage',))"
    assert python(f"import mmnnx as mm; print({made}._repr_mimebundle_()[0].keys())").count("image/svg+xml")
