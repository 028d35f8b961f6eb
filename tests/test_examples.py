"""Every public name has an example, and the examples of all docstrings run and print what they say."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

import mmnnx as mm
import multimesh_compat
from tests.slow import all_but

ROOT = Path(__file__).parent.parent
CONF = (ROOT / "docs/conf.py").read_text(encoding="utf-8")
PUBLIC = ast.literal_eval(re.findall(r"^PUBLIC = (\[.*?\])$", CONF, flags=re.DOTALL | re.MULTILINE)[0])
MODULES = [
    importlib.import_module(module.name)
    for package in (mm, multimesh_compat)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


def examples(module: ModuleType, **names: Any) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]


@functools.cache
def given() -> dict[str, Any]:
    """What the reference says that examples start from: the second program of its first page."""
    page = (ROOT / "docs/reference/index.md").read_text(encoding="utf-8")
    _, program = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "reference"}
    exec(compile(program, "docs/reference/index.md", "exec"), names)
    return names


@pytest.fixture
def left_as_it_was(tmp_path, monkeypatch):
    """Files go to a folder that is new; tasks, and what `multimesh_compat.install` sets, are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(jax.lax, "with_sharding_constraint", jax.lax.with_sharding_constraint)
    mm.clear_tasks()
    yield
    mm.clear_tasks()


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_an_example(package):
    module = importlib.import_module(package)
    ours = {name: getattr(module, name) for name in module.__all__}
    ours = {
        name: x for name, x in ours.items() if getattr(x, "__module__", "").startswith(("mmnnx", "multi"))
    }
    assert ours and not [name for name, x in ours.items() if ">>> " not in (x.__doc__ or "")]


@pytest.mark.parametrize(
    "name", all_but(["mmnnx.sharding.task"], [module.__name__ for module in MODULES if examples(module)])
)
@pytest.mark.usefixtures("left_as_it_was")
def test_the_examples_of(name):
    module = sys.modules[name]
    package = sys.modules[name.rpartition(".")[0]]
    exported = {name: getattr(package, name) for name in getattr(package, "__all__", ())}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(module, **{**exported, **vars(module), **given()}):
        said: list[str] = []
        assert not runner.run(test, out=said.append).failed, "".join(said)
