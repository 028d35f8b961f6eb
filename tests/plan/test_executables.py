"""The executables of a plan in a file, and loaded from it in place of being compiled."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import mmnnx as mm
from mmnnx.mpmd.compile import executables, saved_executables
from tests.plan.conftest import plan_here, small, tokens

JOB = small(stages=4, layers=4, tensor=2, batch=8)

# In processes of their own, without the cache on disk of these tests: on CPU what comes out of one cannot be
# serialized again.
SAVE = """
import sys
from tests.plan.conftest import plan_here
from tests.plan.test_executables import JOB, losses

print(losses(JOB))
plan_here(JOB).save(sys.argv[1])
"""
LOAD = """
import sys
import mmnnx as mm
from tests.plan.test_executables import JOB, losses, watched

mm.load_executables(sys.argv[1])
compiled = watched()
print(losses(JOB))
print(*compiled)
"""


def python(script: str, *args: str) -> list[str]:
    """The lines that a script prints, on eight devices."""
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses(job) -> list[float]:
    """Of four steps from the same weights on the devices of this process."""
    with job.mesh(jax.devices()[: job.stages * job.data * job.tensor]):
        model, optimizer = job.make()
        step = job.train_step(model)
        return [float(step(model, optimizer, tokens(job))) for _ in range(4)]


def watched() -> list[str]:
    """The names of the fragments that XLA compiles from now on."""
    names: list[str] = []
    compile_lowered = executables.compile_lowered

    def note(lowered, options):
        names.append(re.search(r"module @jit_(\w+)", lowered.stage.as_text())[1])
        return compile_lowered(lowered, options)

    executables.compile_lowered = note
    return names


@pytest.fixture
def forgotten(monkeypatch, no_folder, compiled_anew):
    """What was loaded in the test is forgotten after it; what was compiled before it is compiled again."""
    monkeypatch.setattr(saved_executables, "_loaded", {})


@pytest.mark.slow
def test_what_is_loaded_is_not_compiled(tmp_path):
    """On all meshes, though one of alike fragments is in the file; with the same losses.

    A first step donates no counters, and a plan is of those after it: its optimizer is compiled.
    """
    path = str(tmp_path / "step.executables")
    (expected,) = python(SAVE, path)
    printed, compiled = python(LOAD, path)
    assert printed == expected
    assert "ward" not in compiled and len(compiled.split()) < 8


@pytest.mark.slow
def test_alike_fragments_are_in_the_file_once(tmp_path, forgotten):
    plan = plan_here(JOB)
    plan.save(tmp_path / "step.executables")
    kept = {f.alike for f in plan.fragments}
    assert mm.load_executables(tmp_path / "step.executables") == len(kept) < len(plan.fragments)


CACHED = """
import logging, re, sys
import jax

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_explain_cache_misses", True)

from tests.plan.conftest import plan_here
from tests.plan.test_executables import JOB, losses

missed = []

class Note(logging.Handler):
    def emit(self, record):
        missed.extend(re.findall(r"CACHE MISS.* for 'jit_(stage\\w*ward\\w*)'", record.getMessage()))

logging.getLogger("jax._src.compiler").addHandler(Note())
plan_here(JOB) if sys.argv[2] == "plan" else losses(JOB)
print(len(set(missed)))
"""


@pytest.mark.slow
def test_the_persistent_cache_of_a_plan_serves_the_run(tmp_path):
    """All forwards and backwards that the plan compiled the run finds in JAX's cache."""
    missed = {}
    for what in ("plan", "run"):
        missed[what] = int(python(CACHED, str(tmp_path), what)[-1])
    assert missed["plan"] > 4 and missed["run"] == 0


@pytest.mark.slow
def test_what_the_runtime_refuses_is_compiled(tmp_path, forgotten):
    expected = losses(JOB)
    plan_here(JOB).save(tmp_path / "step.executables")
    version, found = pickle.loads((tmp_path / "step.executables").read_bytes())
    broken = {key: (kind, (payload[:-40], ids)) for key, (kind, (payload, ids)) in found.items()}
    others = {key: ("NVIDIA H200", saved) for key, (_, saved) in found.items()}
    for written, said in (
        (broken, "a saved executable is not for .*, and is compiled anew"),
        (others, "saved executables are for NVIDIA H200, and here is cpu: they are compiled anew"),
    ):
        (tmp_path / "step.executables").write_bytes(pickle.dumps((version, written)))
        saved_executables._loaded.clear()  # or what was loaded for this kind of device would still be known
        mm.load_executables(tmp_path / "step.executables")
        executables._in_use.clear()
        with pytest.warns(UserWarning, match=said):
            assert losses(JOB) == expected


@pytest.mark.slow
def test_another_step_is_compiled(tmp_path, forgotten):
    plan_here(JOB).save(tmp_path / "step.executables")
    mm.load_executables(tmp_path / "step.executables")
    other = small(stages=4, layers=4, batch=8, sequence=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(losses(other)).all()


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", *map(pickle.dumps, (3, {"a": 1, "b": 2}, ("0.10.2", [1])))]
)
def test_no_such_file(tmp_path, content):
    (tmp_path / "it").write_bytes(content)
    with pytest.raises(ValueError, match="it: this is no file of executables"):
        mm.load_executables(tmp_path / "it")


def test_another_version(tmp_path):
    (tmp_path / "it").write_bytes(pickle.dumps(("0.1.0", {})))
    with pytest.raises(ValueError, match=f"written with jax 0.1.0, and here is jax {jax.__version__}"):
        mm.load_executables(tmp_path / "it")
