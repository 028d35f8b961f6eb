"""Eight virtual CPU devices for every test, asked for before JAX starts."""

import os

import hypothesis

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    # Tests compile much and compute little: LLVM need not optimise what XLA hands it.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

# A run that decides whether a change is taken tries the same examples every time; at home, new ones.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")
