"""Programs import multimesh.jax, legate.jax and their plugin after install(); nothing real is replaced."""

import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import pickle
import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import mmnnx
import multimesh_compat.jax
from multimesh_compat import plugin
from multimesh_compat.install import install
from multimesh_compat.jax import constraints, flax

ALIASES = ["multimesh.jax", "legate.jax", "jax_plugins.multimesh", "jax_plugins.legate"]
PACKAGES = {"multimesh", "legate", "jax_plugins"}


def of_packages():
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES}


@pytest.fixture(autouse=True)
def uninstalled(monkeypatch):
    """Each test starts without the aliases, and what it installs and imports is gone after it."""
    own = [finder for finder in sys.meta_path if type(finder).__module__ != "multimesh_compat.install"]
    monkeypatch.setattr(sys, "meta_path", own)
    monkeypatch.setattr(jax.lax, "with_sharding_constraint", jax.lax.with_sharding_constraint)
    before = of_packages()
    for name in before:
        del sys.modules[name]
    yield
    for name in of_packages():
        del sys.modules[name]
    sys.modules.update(before)


def write(root, *files, text=""):
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


def run(program, *, path=(), **environment):
    """Runs a program in a process of its own; returns what it printed, warnings and logs included."""
    root = Path(multimesh_compat.jax.__file__).parents[2]
    unset = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    paths = os.pathsep.join(map(str, [*path, root]))
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=unset | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


# What can be imported.


def test_nothing_can_be_imported_before():
    for name in ALIASES:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_modules_are_the_same_objects():
    install()
    import jax_plugins.legate
    import jax_plugins.multimesh
    import legate.jax.flax
    import multimesh.jax as mm
    import multimesh.jax.flax
    from multimesh import jax as from_package

    assert mm is multimesh.jax is from_package is legate.jax is multimesh_compat.jax
    assert multimesh.jax.flax is legate.jax.flax is flax
    assert jax_plugins.multimesh is jax_plugins.legate is plugin
    assert mm.Task is mmnnx.Task
    assert isinstance(mmnnx.Task("a"), multimesh.jax.Task)


def test_names_can_be_imported_from_modules():
    install()
    from jax_plugins import multimesh as imported
    from legate.jax import Task as earlier
    from multimesh.jax import Task
    from multimesh.jax.constraints import with_sharding_constraint

    assert Task is earlier is mmnnx.Task
    assert with_sharding_constraint is constraints.with_sharding_constraint
    assert imported.init is plugin.init


def test_importlib_finds_modules():
    install()
    for name in [
        *ALIASES,
        "multimesh",
        "legate",
        "jax_plugins",
        "multimesh.jax.flax",
        "legate.jax.constraints",
    ]:
        assert importlib.util.find_spec(name) is not None
    assert importlib.import_module("multimesh.jax.flax") is flax
    assert importlib.import_module(".constraints", "legate.jax") is constraints


def test_modules_keep_their_own_specs():
    """Else reload, pickle and tools would take the other name for the module's own."""
    spec = multimesh_compat.jax.__spec__
    install()
    import legate.jax
    import multimesh.jax

    assert multimesh.jax.__spec__ is legate.jax.__spec__ is spec
    assert (spec.name, multimesh.jax.__name__) == ("multimesh_compat.jax", "multimesh_compat.jax")


def test_a_module_that_two_threads_load_by_two_names_keeps_its_own_spec():
    spec = multimesh_compat.jax.__spec__
    install()
    specs = [importlib.util.find_spec(name) for name in ["multimesh.jax", "legate.jax"]]
    modules = [importlib.util.module_from_spec(found) for found in specs]
    for found, module in zip(specs, modules):
        found.loader.exec_module(module)
    assert modules == [multimesh_compat.jax] * 2
    assert multimesh_compat.jax.__spec__ is spec


def test_what_was_pickled_under_either_name_loads():
    install()
    task = mmnnx.Task("a", mesh_slice={"stage": 1})
    assert pickle.loads(pickle.dumps(task)) == task
    under_alias = b"cmultimesh.jax\nTask\n."
    assert pickle.loads(under_alias) is mmnnx.Task
    under_alias = b"clegate.jax.constraints\nwith_sharding_constraint\n."
    assert pickle.loads(under_alias) is constraints.with_sharding_constraint


@pytest.mark.parametrize("name", ["multimesh.nope", "multimesh.jax.nope", "legate.core", "jax_plugins.nope"])
def test_other_names_are_not_found(name):
    install()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)


def test_install_imports_nothing_and_twice_is_once():
    install()
    finders = list(sys.meta_path)
    install()
    assert sys.meta_path == finders
    assert of_packages() == {}


# What is there already.


@pytest.mark.parametrize(
    "file",
    [
        "multimesh/__init__.py",
        "multimesh.py",
        "multimesh/jax/__init__.py",
        "multimesh/jax.py",
        "legate/jax/__init__.py",
        "legate.py",
        "jax_plugins/multimesh/__init__.py",
        "jax_plugins/legate.py",
    ],
)
def test_a_real_installation_is_refused(file, tmp_path, monkeypatch):
    write(tmp_path, file, text="raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    with pytest.raises(ImportError, match="replaces nothing that is installed") as refusal:
        install()
    name = file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    assert f"{name}: {tmp_path / file}" in str(refusal.value)
    assert (refusal.value.name, refusal.value.path) == (name, str(tmp_path / file))
    assert sys.meta_path == finders
    assert of_packages() == {}


def test_a_refusal_names_all_that_is_there(tmp_path, monkeypatch):
    files = ["multimesh/__init__.py", "multimesh/jax/__init__.py", "jax_plugins/multimesh.py"]
    write(tmp_path, *files)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as refusal:
        install()
    assert all(str(tmp_path / file) in str(refusal.value) for file in files)


def test_modules_made_by_the_process_are_refused():
    sys.modules["multimesh"] = types.ModuleType("multimesh")
    with pytest.raises(ImportError, match="multimesh: made by this process"):
        install()


def test_a_package_found_by_an_importer_of_its_own_is_refused():
    """As editable installations are."""

    class Editable:
        def find_spec(self, name, path=None, target=None):
            if name == "legate":
                return importlib.machinery.ModuleSpec(name, None, is_package=True)
            if name == "legate.jax":
                return importlib.machinery.ModuleSpec(name, None, origin="/src/legate/jax.py")
            return None

    sys.meta_path.append(Editable())
    with pytest.raises(ImportError, match=r"legate\.jax: /src/legate/jax\.py"):
        install()


def test_a_package_without_the_name_is_added_to(tmp_path, monkeypatch):
    write(tmp_path, "legate/__init__.py", text="version = 3")
    write(tmp_path, "legate/core.py", text="real = True")
    monkeypatch.syspath_prepend(tmp_path)
    install()
    import legate.core
    import legate.jax

    assert legate.__file__ == str(tmp_path / "legate" / "__init__.py")
    assert (legate.version, legate.core.real) == (3, True)
    assert legate.jax is multimesh_compat.jax


def test_a_folder_that_happens_to_be_called_multimesh(tmp_path, monkeypatch):
    write(tmp_path, "multimesh/tutorial.py", text="steps = 2")
    monkeypatch.syspath_prepend(tmp_path)
    install()
    import multimesh.jax
    import multimesh.tutorial

    assert multimesh.tutorial.steps == 2
    assert multimesh.jax is multimesh_compat.jax


# In a process of its own.


@pytest.mark.slow
def test_init_sets_the_number_of_devices_after_everything_is_imported():
    """Neither install nor an import starts JAX; init outranks XLA_FLAGS and JAX_NUM_CPU_DEVICES."""
    program = """
from multimesh_compat.install import install
install()
from jax_plugins import multimesh
import multimesh.jax as mm
import legate.jax.flax
multimesh.init(cpus=5)
multimesh.init(cpus=3)
multimesh.init()
import jax
print(len(jax.devices()), mm.TaskMesh(devices=[0, 2], axis_sizes=[2], axis_names=["x"]).devices)
multimesh.init(cpus=3)
"""
    flags = os.environ["XLA_FLAGS"]
    assert "--xla_force_host_platform_device_count=8" in flags
    assert run(program, JAX_NUM_CPU_DEVICES="6") == "3 (0, 2)\n"


@pytest.mark.slow
def test_threads_that_install_and_import_at_once():
    program = """
import sys, threading
from multimesh_compat.install import install
sys.setswitchinterval(1e-6)
barrier, done = threading.Barrier(16), []
def work(n):
    barrier.wait()
    install()
    if n % 2:
        from multimesh.jax import Task
        from legate.jax.flax import __name__ as name
    else:
        from legate.jax import Task
        from multimesh.jax.flax import __name__ as name
    done.append((Task, name))
threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import multimesh_compat.jax.flax
print(len(done), len(set(done)), multimesh_compat.jax.__spec__.name, multimesh_compat.jax.flax.__spec__.name)
"""
    assert run(program) == "16 1 multimesh_compat.jax multimesh_compat.jax.flax\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "order, real", [*itertools.product(["install(); import jax", "import jax; install()"], [True, False])]
)
def test_jax_finds_its_real_plugins_and_no_others(order, real, tmp_path):
    """JAX imports and initializes every module in the folders of jax_plugins, and logs what fails."""
    if real:
        write(tmp_path, "jax_plugins/real.py", text="def initialize(): print('initialized')")
    program = f"""
from multimesh_compat.install import install
{order}
from jax_plugins import multimesh
multimesh.init(cpus=2)
print(len(jax.devices()))
"""
    assert run(program, path=[tmp_path]) == "initialized\n" * real + "2\n"


# init, where JAX has started with the 8 devices of these tests.


def test_init_is_content_with_the_devices_there_are():
    assert len(jax.devices("cpu")) == 8
    plugin.init()
    plugin.init(None)
    plugin.init(8)
    plugin.init(cpus=np.int64(8))


def test_init_says_that_jax_has_started():
    assert len(jax.devices("cpu")) == 8
    before = jax.config.jax_num_cpu_devices
    with pytest.raises(
        RuntimeError, match=r"cpus=4\).*JAX has started already, with 8 CPU device.*Call init before"
    ):
        plugin.init(cpus=4)
    assert jax.config.jax_num_cpu_devices == before


@pytest.mark.parametrize("cpus", [0, -1])
def test_init_needs_a_device(cpus):
    with pytest.raises(ValueError, match=f"cpus={cpus}.*at least one CPU device"):
        plugin.init(cpus)


@pytest.mark.parametrize("cpus", [8.0, "8", True, [8]])
def test_init_takes_an_integer(cpus):
    with pytest.raises(TypeError, match="it takes an integer, or None"):
        plugin.init(cpus)


@pytest.mark.parametrize("gpus", [1.0, "1", True])
def test_init_takes_an_integer_of_gpus(gpus):
    with pytest.raises(TypeError, match="gpus=.*it takes an integer, or None"):
        plugin.init(gpus=gpus)
    with pytest.raises(ValueError, match="gpus=-1.*at least zero GPU"):
        plugin.init(gpus=-1)


def test_init_of_gpus_after_the_start():
    plugin.init(gpus=0)
    with pytest.raises(RuntimeError, match=r"gpus=2\).*with 0 GPU"):
        plugin.init(8, 2)


def test_init_says_what_there_is_instead(monkeypatch):
    """debug, fbmem and profile are of the published runtime; dump is MMNNX_DUMP."""
    monkeypatch.setenv("MMNNX_DUMP", "")  # and is put back at the end
    for name in ("debug", "fbmem", "profile"):
        with pytest.warns(UserWarning, match=rf"init\({name}=1\) changes nothing here: "):
            plugin.init(**{name: 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.init(debug=False, fbmem=None, profile=0, dump=None)
    assert not os.environ["MMNNX_DUMP"]
    plugin.init(dump=Path("folder"))
    assert os.environ["MMNNX_DUMP"] == "folder"


@pytest.mark.slow
def test_init_test_and_shutdown():
    program = """
from multimesh_compat.install import install
install()
from jax_plugins import multimesh
import jax
multimesh.init_test()
print(len(jax.devices()), jax.default_backend(), jax.config.jax_platforms)
multimesh.init_test(8)
multimesh.shutdown()
"""
    assert run(program, JAX_PLATFORMS="") == "8 cpu cpu\n"


# Constraints of jax.lax.

LOGICAL = """
{imports}
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from multimesh.jax import autoshard, parallelize, task
from jax_plugins import multimesh
multimesh.init(cpus=4)

def rows(w, x):
    return x @ with_sharding_constraint(w, P("rows", None))

rows = task(rows, devices=jax.devices()[:2], device_axes=("x",), logical_axes=[("rows", "x")])
step, init, batch = parallelize(
    lambda w, x: rows(w, jax.lax.with_sharding_constraint(x, P(None, "rows"))),
    lambda: jnp.ones((4, 4)), lambda: jnp.ones((4, 4)),
)
print(tuple(init().sharding.spec), tuple(batch().sharding.spec), float(step(init(), batch()).sum()))
with_sharding_constraint(jnp.ones(4), jax.sharding.SingleDeviceSharding(jax.devices()[1]))
with autoshard():
    with_sharding_constraint(jnp.ones(4), P("rows"))
try:
    with_sharding_constraint(jnp.ones(4), P("rows"))
except (RuntimeError, ValueError) as error:
    print("mesh" in str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["install(); import jax", "import jax; install()"])
def test_constraints_of_jax_lax_take_logical_names(order):
    """In tasks and in parallelize; elsewhere they are as they were."""
    imports = (
        f"from multimesh_compat.install import install\n{order}\nfrom jax.lax import with_sharding_constraint"
    )
    expected = "('x',) (None, 'x') 64.0\nTrue\n"
    assert run(LOGICAL.format(imports=imports)) == expected
