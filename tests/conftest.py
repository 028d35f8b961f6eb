"""Eight virtual CPU devices for every test, asked for before JAX starts; and programs that compile fast."""

import gc
import os
import tempfile
from pathlib import Path
from weakref import WeakValueDictionary

import hypothesis
import pytest

from tests.environment import MLIR_ALONE, compile_fast
from tests.slow import mark_slow_cases

compile_fast()  # what is set here holds for the processes that tests start, too

# A run that decides whether a change is taken tries the same examples every time; at home, new ones.
HOW = dict(deadline=None, print_blob=True)
HOW |= dict(derandomize=True, database=None) if os.environ.get("CI") else {}
hypothesis.settings.register_profile("all", **HOW)  # make test-all
hypothesis.settings.register_profile("some", **HOW)  # fewer where tests.slow.examples says how many there are
hypothesis.settings.load_profile("some")

import jax  # noqa: E402  # reads the environment
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from mmnnx.mpmd.compile import executables  # noqa: E402

if MLIR_ALONE:
    # The second test that compiles a program reads it from a folder: one for each worker, for JAX writes it
    # without a lock.
    COMPILED = tempfile.TemporaryDirectory(prefix="mmnnx-tests-")
    jax.config.update("jax_compilation_cache_dir", COMPILED.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# A traced model is a hundred thousand objects, and hardly any garbage: look for it seldom.
gc.set_threshold(100_000, 50, 100)

# What one program has compiled another test's may use, also when the first is gone.
executables._in_use = {}

MAPS = Path("/proc/self/maps")


def pytest_addoption(parser):
    parser.addoption(
        "--part", help="K/N: of the tests that are selected, those numbered K, K + N, K + 2 N ..."
    )


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(config, items):
    mark_slow_cases(items)
    yield  # pytest leaves out the slow ones
    if config.getoption("part"):
        first, step = map(int, config.getoption("part").split("/"))
        part = items[first::step]
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % step != first])
        items[:] = part


def pytest_collection_finish():
    """What is imported by now stays, and need not be searched."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """Each compiled program is a few memory maps, of which Linux gives a process 65,530; then LLVM aborts."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 45_000:
        executables._in_use.clear()
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture
def fast_gc():
    """For a test that collects garbage: what is there before it need not be searched, which takes seconds."""
    gc.freeze()


@pytest.fixture
def compiled_anew(monkeypatch):
    """For a test that looks at what is compiled."""
    monkeypatch.setattr(executables, "_in_use", WeakValueDictionary())


@pytest.fixture
def no_folder():
    """JAX without its cache on disk, which these tests have under some versions."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # or JAX would go on with the folder it has
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
