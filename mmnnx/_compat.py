"""The one place where mmnnx touches what JAX and Flax do not promise to keep.

Each entry says why a public API will not do and where the versions differ (JAX 0.10 to 0.12).
`tests/test_compat.py` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax
import jax
import jax.extend.backend
import jax.extend.core as jex
import numpy as np
import optax
from flax import nnx
from jax._src import (
    cache_key,
    clusters,
    compilation_cache,
    compiler,
    distributed,
    monitoring,
    source_info_util,
    xla_bridge,
)
from jax._src import config as jax_config
from jax._src.array import ArrayImpl
from jax._src.core import JaxprEqnContext, internal_mutable_array_effect, pytype_aval_mappings
from jax._src.dtypes import register_canonicalize_value_handler
from jax._src.effects import ordered_effects
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax._src.mesh import get_concrete_mesh, thread_resources
from jax._src.state.discharge import discharge_state
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh, Sharding

# A ClosedJaxpr up to JAX 0.11 wraps a Jaxpr; from 0.12 the two are one class that holds its constants.
JAXPR_TYPES: tuple[type, ...] = (jex.ClosedJaxpr, jex.Jaxpr)


def open_jaxpr(jaxpr: Any) -> tuple[list[Any], list[Any], list[Any], list[tuple[Any, Any]]]:
    """Splits a jaxpr, open or closed, into (invars, outvars, equations, [(constvar, value)])."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = list(getattr(jaxpr, "consts", ()))
    return list(inner.invars), list(inner.outvars), list(inner.eqns), list(zip(inner.constvars, consts))


def close_jaxpr(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    constants: Mapping[Any, Any] = MappingProxyType({}),
) -> Any:
    """Builds a closed jaxpr from its parts; `constants` are variables and the arrays that they stand for."""
    effects = frozenset().union(*(e.effects for e in eqns))
    names = tuple(f"in{n}" for n in range(len(invars))), tuple(f"out{n}" for n in range(len(outvars)))
    info = jex.DebugInfo("mmnnx", "fragment", *names)  # JAX 0.10 deprecates jaxprs without one
    variables, values = list(constants), list(constants.values())
    jaxpr = jex.Jaxpr(variables, list(invars), list(outvars), list(eqns), effects=effects, debug_info=info)
    return jex.ClosedJaxpr(jaxpr, values)


def map_equations(jaxpr: Any, fun: Any) -> Any:
    """A jaxpr, open or closed, with `fun` applied to each equation; the same object if nothing changed.

    Args:
      fun: gives an equation, or a list of those that stand for it.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    made = (fun(e) for e in inner.eqns)
    eqns = [e for new in made for e in (new if isinstance(new, list) else [new])]
    if len(eqns) == len(inner.eqns) and all(a is b for a, b in zip(eqns, inner.eqns)):
        return jaxpr
    changed = inner.replace(eqns=eqns)
    return changed if inner is jaxpr else jaxpr.replace(jaxpr=changed)


def rewrite_jaxpr(jaxpr: Any, new: Any, equations: Any, read: Any) -> Any:
    """A jaxpr, open or closed, of other variables and equations.

    Args:
      new: from a constant or input to the variable that stands for it.
      equations: from an equation to those that stand for it.
      read: from a result to the atom that stands for it.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    constvars, invars = ([new(v) for v in variables] for variables in (inner.constvars, inner.invars))
    eqns = [e for eqn in inner.eqns for e in equations(eqn)]
    outvars = [read(a) for a in inner.outvars]
    consts = {"consts": inner.consts} if hasattr(inner, "consts") else {}  # from JAX 0.12
    changed = inner.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars, **consts)
    return changed if inner is jaxpr else jaxpr.replace(jaxpr=changed)


def traced_under(eqn: Any) -> AbstractMesh:
    """The mesh that was set where an equation was traced, and is set again where it is lowered."""
    return eqn.ctx.cur_abstract_mesh


def as_traced_under(mesh: AbstractMesh, eqn: Any) -> Any:
    """An equation as if it had been traced under another mesh; all else that was set stays."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return eqn.replace(ctx=JaxprEqnContext())


def subjaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among an equation's parameters (bodies of scan, cond, remat, custom_vjp, ...)."""
    found = []
    for value in eqn.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        found += [v for v in values if isinstance(v, JAXPR_TYPES)]
    return found


def map_inner_equations(eqn: Any, fun: Any) -> Any:
    """An equation with `fun` applied to each equation of the jaxprs among its parameters, as in
    `map_equations`; the same object if nothing changed."""

    def mapped(value: Any) -> Any:
        if isinstance(value, JAXPR_TYPES):
            return map_equations(value, fun)
        if isinstance(value, tuple) and any(isinstance(v, JAXPR_TYPES) for v in value):
            inner = [mapped(v) for v in value]
            if all(a is b for a, b in zip(inner, value)):
                return value
            return type(value)._make(inner) if hasattr(value, "_make") else tuple(inner)
        return value

    params = {key: mapped(value) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[k] is not eqn.params[k] for k in params) else eqn


def under_scope(eqn: Any, scope: str) -> Any:
    """An equation with this name stack, as text. What calls are inlined of has one that is put together."""
    if str(eqn.source_info.name_stack) == scope:
        return eqn
    stack = source_info_util.new_name_stack(scope)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


UNKNOWN_LINE = "an unknown line"


def source_line(eqn: Any) -> str:
    """The line of the user's program that an equation was traced at; JAX would stop at Flax or optax."""
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    libraries = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (flax, optax))
    own = [f for f in frames if not f.file_name.startswith(libraries)] or frames
    return f"{_line(own[0].file_name, own[0].start_line)} ({own[0].function_name})" if own else UNKNOWN_LINE


def _line(file: str, number: int) -> str:
    """A line of a file; in IPython of a cell, whose file is a temporary one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return f"{file}:{number}" if cell is None else f"cell {cell[1]}, line {number}"


def compiled_takes_sub_byte_types() -> bool:
    """Whether what is compiled ahead takes types of less than a byte, such as int4.

    Before JAX 0.12 sharded ones are passed in another layout than it was compiled for.
    """
    return jax.__version_info__ >= (0, 12)


def solve_of(eqn: Any) -> tuple[Any, list[Any]]:
    """What a `custom_linear_solve` runs, as a closed jaxpr, and its operands; the rest is for derivatives.

    `jax.lax.custom_linear_solve` says which functions it takes, and not how its primitive has them.
    """
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts = eqn.invars[first : first + lengths.solve]
    return eqn.params["jaxprs"].solve, [*consts, *eqn.invars[sum(lengths) :]]


def one_by_one(eqn: Any) -> list[Any]:
    """A `device_put` of several arrays, as one of each: all of its parameters have an entry for each. An
    `optimization_barrier` has none."""
    return [
        eqn.replace(invars=[a], outvars=[v], params={key: (each[n],) for key, each in eqn.params.items()})
        for n, (a, v) in enumerate(zip(eqn.invars, eqn.outvars))
    ]


def without_dead(eqn: Any) -> Any:
    """A `cond` or `while` without the operands that nothing in it reads.

    NNX hands whole modules to them. What removes them is in `jax.interpreters`, but for `while` in JAX 0.10.
    """
    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        keep = [any(used) for used in zip(*(_dce(b)[1] for b in params["branches"]))]
        params["branches"] = tuple(_dce(b, keep)[0] for b in params["branches"])
        operands = [a for a, k in zip(eqn.invars[1:], keep) if k]
        return eqn.replace(invars=[eqn.invars[0], *operands], params=params)
    invars: list[Any] = []
    first, carries = 0, len(eqn.invars) - params["cond_nconsts"] - params["body_nconsts"]
    for part in ("cond", "body"):
        count, jaxpr = params[f"{part}_nconsts"], params[f"{part}_jaxpr"]
        keep = _dce(jaxpr)[1][:count]
        invars += [a for a, k in zip(eqn.invars[first:], keep) if k]
        params[f"{part}_jaxpr"] = _dce(jaxpr, [*keep, *[True] * carries])[0]
        params[f"{part}_nconsts"] = sum(keep)
        first += count
    return eqn.replace(invars=[*invars, *eqn.invars[first:]], params=params)


def _dce(jaxpr: Any, keep: Sequence[bool] | bool = False) -> tuple[Any, list[bool]]:
    """A closed jaxpr without what its results do not need, and which inputs it has left; some are kept."""
    inner, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), keep)
    return jaxpr.replace(jaxpr=inner), used


def without_references(jaxpr: Any) -> Any:
    """A closed jaxpr in which reads and writes of references (`jax.new_ref`) are operations on arrays.

    In the place of an argument that is a reference is what it holds; what it holds in the end is returned
    behind the other results. `jax.jit` does this when it compiles, and offers no way to ask for it.
    """
    return discharge_state(jaxpr)


def makes_references(jaxpr: Any) -> bool:
    """Whether `jax.new_ref` is called in a closed jaxpr; what says so has no public name."""
    return internal_mutable_array_effect in jaxpr.effects


def held(x: Any) -> Any:
    """The array that a reference holds, which JAX shows only as a copy; anything else as it is."""
    return x._refs._buf if type(x) is jax.Ref else x


def note_parts(array: jax.Array, parts: Sequence[jax.Array]) -> None:
    """Notes on a replicated array the arrays on some of its devices that it was made of.

    To take it apart again costs more than a small call. JAX keeps what it derives of an array there as well.
    """
    if type(array) is ArrayImpl:
        array.__dict__[_PARTS] = {part.sharding: part for part in parts}


def noted_part(array: Any, sharding: Sharding) -> jax.Array | None:
    """The one with this sharding of what an array was made of."""
    parts = array.__dict__.get(_PARTS) if type(array) is ArrayImpl else None
    return parts.get(sharding) if parts else None


_PARTS = "mmnnx_parts"


def hold(reference: jax.Ref, x: jax.Array) -> None:
    """Has a reference hold this array, where it is; `reference[...] = x` makes a copy where it was.

    JAX writes to what a reference holds, also to read it: what an array was made of is forgotten.
    """
    vars(x).pop(_PARTS, None)
    reference._refs._buf = x


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation; from JAX 0.12 they are a tree."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def copy_to(arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Starts copying arrays to other devices, each shard by shard, and returns at once.

    The shards of the two shardings must be equal one by one. `jax.device_put` ends in the same call
    after 50 microseconds of Python, ten times the cost of the call, and a pipeline makes hundreds a step.
    """
    return xla_client.batched_copy_array_to_devices_with_sharding(
        list(arrays),
        [s._internal_device_list for s in shardings],
        list(shardings),
        [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(arrays),
    )


def asked_transfers() -> contextlib.AbstractContextManager[None]:
    """Inside it `jax.transfer_guard` takes copies between devices as asked for, as `jax.device_put` is."""
    return jax_config.explicit_device_put_scope()


NODE: type = nnx.extract.NodeStates
"""What an NNX object is among the arguments that an `nnx.jit` object hands to `jax.jit`."""

TREE_STATE: Any = nnx.extract.TreeState
"""The same without updates of graphs; and what `nnx.prefix` makes of an NNX object in graph mode, with
shardings in `.state`."""


def graph_modes(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """(graph, graph_updates) as `nnx.jit` takes them: what is None is as Flax is set, for which it documents
    no way to ask."""
    return (
        nnx.set_graph_mode.current_value() if graph is None else graph,
        nnx.set_graph_updates.current_value() if graph_updates is None else graph_updates,
    )


def pure_function(jitted: Any) -> Any:
    """The function over pytrees of arrays that an `nnx.jit` object hands to `jax.jit`.

    Lifting (graph and tree mode, updates, aliasing) stays Flax's own; only what runs underneath is replaced.
    """
    return jitted.jitted_fn.__wrapped__


def replace_pure_function(jitted: Any, replacement: Any) -> None:
    """Makes an `nnx.jit` object run `replacement` where it would run `jax.jit(pure_function)`."""
    jitted.jitted_fn = replacement


def context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` or `with mesh:` around what runs, which bare PartitionSpecs name axes of.

    `jax.sharding.get_mesh` knows nothing of the second, and refuses to answer while something is traced.
    """
    meshes = get_concrete_mesh(), thread_resources.env.physical_mesh
    return next((mesh for mesh in meshes if not mesh.empty), None)


def enter_mesh(mesh: Mesh) -> None:
    """`mesh.__enter__()`, without the warning that `with mesh:` is deprecated.

    To silence that is to change, at each entry, the filters of warnings, which are those of all threads.
    """
    env = thread_resources.stack[-1].with_mesh(mesh)
    thread_resources.stack.append(env)
    thread_resources.env = env
    meshes = (each.physical_mesh for each in thread_resources.stack)
    jax_config.mesh_context_manager.set_local(tuple(m for m in meshes if not m.empty))


def trace_context() -> Any:
    """All configuration that a trace depends on (matmul precision, x64, ...), as `jax.jit` keys its cache."""
    return jax_config.trace_context()


def same_graph(one: nnx.GraphDef, other: nnx.GraphDef) -> bool:
    """Whether two graph definitions are equal, where static values that are one object are.

    `==` of definitions asks such objects from Python 3.13 on. A tracer that a Module keeps from an earlier
    trace then raises an error of its own, ahead of the one that says what it is.
    """

    def parts(graph: nnx.GraphDef) -> tuple[Any, ...]:
        values = [(name, getattr(attribute, "value", attribute)) for name, attribute in graph.attributes]
        return graph.nodes, values, graph.num_leaves

    return parts(one) == parts(other)


def children(node: Any) -> list[tuple[Any, Any]]:
    """What a graph node or a pytree holds, by key: Modules, Variables, arrays, lists, static values.

    `nnx.iter_children` leaves out all but graph nodes, and so what is in a list or a dict.
    """
    impl = nnx.graph.get_node_impl(node)
    return [] if impl is None else list(impl.node_dict(node).items())


def jit_is_disabled() -> bool:
    """Whether this is inside `jax.disable_jit()`; mypy does not know `jax.config.jax_disable_jit`."""
    return jax_config.disable_jit.value


def set_values(pairs: Sequence[tuple[nnx.Variable, Any]]) -> None:
    """Gives Variables of one trace new values.

    `set_raw_value` asks each whether it is of the current trace, twice, which takes longer than all the rest;
    here the first is asked.
    """
    for n, (variable, value) in enumerate(pairs):
        if n == 0 or variable.hijax or variable.ref:
            variable.set_raw_value(value)
        else:
            object.__setattr__(variable, "_raw_value", value)


class _Noted(nnx.tracers.TraceState):
    """The trace that a Variable belongs to, and a note."""

    __slots__ = ("note",)

    def __init__(self, trace: nnx.tracers.TraceState, note: Any):
        self._jax_trace, self.note = trace.jax_trace, note

    def __reduce__(self) -> Any:
        return nnx.tracers.TraceState, ()


def set_note(variable: nnx.Variable, note: Any) -> None:
    """Keeps something with a Variable that is no part of it: not of its metadata, its clones or its pickle.

    A Variable has no attributes of its own, cannot be hashed and cannot be referred to weakly. But it alone
    has the object that says which trace it belongs to.
    """
    if not (variable.hijax or variable.ref):
        object.__setattr__(variable, "_trace_state", _Noted(variable._trace_state, note))


def can_update(variable: nnx.Variable) -> bool:
    """Whether a Variable is of the trace that runs now. Flax finds out when it has begun to write."""
    return variable.hijax or variable._trace_state.is_valid()


def note(variable: nnx.Variable) -> Any:
    """What `set_note` keeps with a Variable; None without."""
    return getattr(variable._trace_state, "note", None)


def register_array_type(cls: type, aval_of: Any, whole: Any) -> None:
    """Has JAX take instances of a subclass of `jax.Array` for arrays that are not placed.

    JAX has types of arrays beside its own, for PRNG keys, and no public way to add one.

    Args:
      aval_of: from an instance to its type.
      whole: from an instance to an array that stands for it where it is computed with.
    """
    pytype_aval_mappings[cls] = aval_of
    register_canonicalize_value_handler(cls, None)
    pxla.shard_arg_handlers[cls] = lambda xs, *how: pxla.shard_args(*how, [whole(x) for x in xs])


def forward_array_methods(cls: type, array_of: Any) -> None:
    """Gives a subclass of `jax.Array` the methods that it has none of, those of the array it stands for."""

    def method(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(array_of(self), name)(*args, **kwargs)

    def attribute(name: str) -> Any:
        return property(lambda self: getattr(array_of(self), name))

    # Without these two Python would count up to an index that is refused, and none is.
    for name in ("__iter__", "__len__"):
        setattr(cls, name, method(name))
    for name in dir(jax.Array):
        found = getattr(jax.Array, name)
        is_property = isinstance(found, property)
        abstract = getattr(found.fget if is_property else found, "__isabstractmethod__", False)
        if abstract and name not in vars(cls):
            setattr(cls, name, attribute(name) if is_property else method(name))


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same array with a weak type, for which `jax.make_array_from_single_device_arrays` has no name."""
    shards = [shard.data for shard in x.addressable_shards]
    return type(x)(x.aval.update(weak_type=True), x.sharding, shards, committed=x.committed)  # type: ignore[call-arg]


def is_ordered(effect: Any) -> bool:
    """Whether JAX keeps the order of equations with this effect, for which there is no public name."""
    return ordered_effects.contains(effect)


def in_cached_partial() -> bool:
    """Whether the call comes from `nnx.cached_partial`, which needs `nnx.jit` itself to take its cache."""
    return nnx.graphlib.GRAPH_CONTEXT.tmp_static_cache is not None


def inner_stage(stage: Any) -> Any:
    """What `replacement.trace` (`lower`, `compile`) returned, out of the stage object of Flax around it."""
    return stage._inner_obj


def key_value_store() -> Any:
    """The key-value store of `jax.distributed`, in which processes find each other; JAX keeps it to itself.

    Raises:
      RuntimeError: before `jax.distributed.initialize`.
    """
    if distributed.global_state.client is None:
        raise RuntimeError("several processes need mm.initialize() before anything uses a device")
    return distributed.global_state.client


def is_optimizer_state(variable: Any) -> bool:
    """Whether a Variable is state of an `nnx.Optimizer` (mu, nu, ...)."""
    return isinstance(variable, nnx.optimizer.OptState)


def as_optimizer_state(value: Any) -> nnx.Variable:
    """A Variable or an array of optax's own state, as `nnx.Optimizer` would hold it.

    Its metadata is set later: with an `out_sharding`, `nnx.Variable` may make another array of it.
    """
    if not isinstance(value, nnx.Variable):
        return nnx.optimizer.OptState(value)
    metadata = dict(value.get_metadata())
    if "optimizer_sharding" in metadata:
        metadata["out_sharding"] = metadata.pop("optimizer_sharding")
    held = nnx.optimizer.OptState(value.get_raw_value())
    held.set_metadata(**metadata)
    return held


def module_is_pytree(cls: type[nnx.Pytree]) -> bool:
    """Whether an NNX Module class was made with `pytree=True`; a subclass does not inherit the choice,
    and Flax offers no way to ask for it."""
    return cls._pytree__is_pytree


CONSTRUCTION = "_pytree__state"
"""The attribute of an NNX object in which Flax keeps how far its construction is; it holds no arrays."""


def data_attributes(module: nnx.Pytree) -> list[str]:
    """Which attributes of an NNX object are data, in order; all others are static.

    Flax's own flattening finds them as well, but sorts all attributes every time. In a class with
    `pytree=False` it goes by what they hold.
    """
    if module_is_pytree(type(module)):
        is_data = module._pytree__nodes._mapping
        found = [name for name in vars(module) if is_data.get(name)]
    else:
        kinds = (nnx.Variable, jax.Array, jax.Ref, np.ndarray)
        found = [n for n, x in vars(module).items() if nnx.graph.is_node(x) or isinstance(x, kinds)]
    return [name for name in found if name != CONSTRUCTION]


def metadata(variable: nnx.Variable) -> Mapping[str, Any]:
    """What `variable.get_metadata()` copies."""
    return variable._var_metadata


def attribute_order(module: Any) -> list[str] | None:
    """Names of the attributes of an NNX object in the order in which they were made, None where it is lost.

    `vars(module)` has it, but is sorted once the object went through `nnx.merge`, as out of `nnx.jit` and
    `nnx.eval_shape`. What remembers the order there is private to Flax.
    """
    names = list(vars(module))
    if names.index("_pytree__nodes") < names.index("_pytree__state"):
        made = list(vars(module)["_pytree__nodes"])
        if not set(names) <= set(made):
            return None
        names = sorted(names, key=made.index)
    return [name for name in names if not name.startswith("_pytree__")]


def current_name_stack() -> str:
    """The name scopes around what is being traced; in the backward rule of a custom_vjp, which runs outside
    the scopes it belongs to, those of the forward. JAX shows a name stack only on finished equations."""
    return str(source_info_util.current_name_stack())


def under_jit() -> bool:
    """Whether what runs is traced by `jax.jit` or another that makes a jaxpr. A call is part of that then,
    even if none of its arguments is traced. JAX has no other way to ask."""
    return jex.unsafe_am_i_under_a_jit_DO_NOT_USE()


def is_saved(decision: Any) -> bool:
    """Whether a policy of `jax.checkpoint` wants a value kept: policies answer with a bool or a private type.

    Raises:
      ValueError: for a policy that offloads.
    """
    if isinstance(decision, bool):
        return decision
    kind = type(decision).__name__
    if kind not in ("SaveableType", "RecomputeType"):
        raise ValueError("a policy that offloads activations is not supported: save or recompute them")
    return kind == "SaveableType"


def own_process() -> tuple[int, int]:
    """(which process this is, how many there are), by what `jax.distributed` was told.

    `jax.process_index()` starts JAX's devices to find out, and how many to make of them is decided by this.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def backends_are_initialized() -> bool:
    """Whether JAX has started its devices, after which `jax.distributed` comes too late."""
    return xla_bridge.backends_are_initialized()


def detect_cluster(
    coordinator: str | None,
    count: int | None,
    number: int | None,
    devices: Any,
    method: str | None,
    timeout: int,
) -> tuple[str | None, int | None, int | None, Any]:
    """Coordinator, count and number of processes and ids of local devices, completed by JAX's detectors.

    `jax.distributed.initialize` does this too, and connects at once; processes have to meet in between.
    """
    if devices is None and (ids := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        devices = [int(n) for n in ids.split(",")]
    if method == "deactivate" or None not in (coordinator, count, number, devices):
        return coordinator, count, number, devices
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        coordinator, count, number, devices, method, timeout
    )


def copies_between_processes() -> bool:
    """Whether `jax.device_put` takes an array to devices of other processes (GPU and TPU clients may)."""
    return bool(getattr(jax.extend.backend.get_backend(), "supports_cross_host_transfers", False))


def persistent_cache() -> Any:
    """JAX's persistent compilation cache, with `get` and `put` of bytes by key; None without one.

    JAX's own functions for it store executables, each for the devices that it was compiled for.
    """
    backend = jax.extend.backend.get_backend()
    return compilation_cache._get_cache(backend) if compilation_cache.is_cache_used(backend) else None


_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_this_thread = threading.local()


def _count_cache_hit(event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
        _this_thread.cache_hits = getattr(_this_thread, "cache_hits", 0) + 1


def cache_hits() -> int:
    """How many programs this thread took out of JAX's persistent cache since this was first called.

    An executable does not say where it is from; JAX tells those who listen.
    """
    if _count_cache_hit not in monitoring.get_event_listeners():
        jax.monitoring.register_event_listener(_count_cache_hit)
    return getattr(_this_thread, "cache_hits", 0)


@functools.cache
def cache_environment() -> str:
    """What keys of JAX's persistent cache have beside the program: versions, flags, and kind of processor."""
    device = jax.local_devices()[0]
    options = compiler.get_compile_options(1, 1, np.array([[device]]), backend=device.client)
    nothing: Any = jax.jit(lambda: ()).lower().compiler_ir()
    return cache_key.get(nothing, np.array([device]), options, device.client)


def load_serialized(
    payload: bytes, ids: Sequence[int], like: jax.stages.Lowered | jax.stages.Compiled, mesh: Mesh
) -> jax.stages.Compiled:
    """What `jax.experimental.serialize_executable.serialize` made, loaded for a mesh.

    Its own `deserialize_and_load` loads only for the devices that a program was compiled for; and the types
    that it reads are, in JAX 0.12, equal to no other.

    Args:
      payload: the bytes.
      ids: of the devices that it was compiled for.
      like: the same program, lowered or compiled in this process, for a mesh of the same shape.
      mesh: where it is to run.
    """
    devices = list(mesh.devices.flat)
    backend, here = devices[0].client, dict(zip(ids, devices))
    options = compiler.get_compile_options(1, len(devices), np.array(devices).reshape(1, -1), backend=backend)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, *value = pid
            if kind == "client":
                return backend
            if kind == "device":
                return here[value[0]]
            return backend.deserialize_executable(value[0], xla_client.DeviceList(tuple(devices)), options)

    old, _, no_kwargs = Unpickler(io.BytesIO(payload)).load()
    if isinstance(like, jax.stages.Lowered):
        types = like._lowering.compile_args
        avals = types["global_in_avals"], types["global_out_avals"]
    else:
        known = like._executable._unloaded_executable  # type: ignore[attr-defined]
        avals = known.input_avals, known.output_avals
    new = dataclasses.replace(old, input_avals=avals[0], output_avals=avals[1])
    return jax.stages.Compiled(new.load(), [], like.args_info, like.out_tree, no_kwargs=no_kwargs)


def is_traced() -> bool:
    """Whether a trace of `jax.profiler` is being taken; jaxlib's TraceMe says so, undocumented."""
    return jax.profiler.TraceAnnotation.is_enabled()


def splash_attention_gradients(
    kernel: Any, query: Any, key: Any, value: Any, y: Any, log_total: Any, ct: Any, segments: Any = None
) -> tuple[jax.Array, ...]:
    """Those of queries, keys and values through JAX's SplashAttention, by what its forward made.

    Public is its `vjp` alone, which runs the forward first: a backward in a program of its own would too.
    """
    module = importlib.import_module(
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    )
    masks = kernel.dq_mask_info, kernel.dkv_mask_info
    residuals = query, key, value, segments, None, y, log_total, *masks
    found: tuple[Any, ...] = module._splash_attention_bwd(**kernel.kwargs, res=residuals, do=ct)
    return found[3:6]
