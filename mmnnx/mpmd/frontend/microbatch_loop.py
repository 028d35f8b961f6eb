"""The loop that `mm.microbatch` runs: a `jax.lax.scan` over slices of one argument.

It carries the state that the function changes and the accumulators of its results, under a name scope that
carries its description. Outside `mm.jit` it is just that scan; inside, `inline/` recognises the scope.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.extend import core as jex

from mmnnx import _compat
from mmnnx.mpmd.frontend.batch_slices import constrain_slice, divide_batch, slice_batch
from mmnnx.mpmd.frontend.graph import changes, is_node
from mmnnx.mpmd.frontend.reductions import Reduction, reductions
from mmnnx.mpmd.ir.forwarding import forwarded
from mmnnx.mpmd.ir.loop_spec import LoopSpec, loop_scope
from mmnnx.printable import first_few, printable
from mmnnx.sharding.incompatible_devices import advise

CLOSED_OVER = (
    "In mm.microbatch the NNX objects that the function changes or takes gradients of have to be arguments "
    "of it, as in mm.microbatch(lambda model, x: ..., dim=0, size=2, argnum=1)(model, x)"
)


def run_loop(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    argnum: int,
    dim: int,
    size: int | None,
    count: int | None,
    arg_shardings: Any,
    reduce: Any,
    spec: LoopSpec,
) -> Any:
    """Runs `fun` over slices of argument `argnum` and reduces the results; NNX objects are updated.

    Raises:
      ValueError: as `mm.microbatch` says.
    """
    if argnum >= len(args):
        by_name = f"; give {' and '.join(kwargs)} by position" if kwargs else ""
        raise ValueError(
            f"microbatch: argnum={argnum}, but the call has {len(args)} positional arguments{by_name}"
        )
    try:
        size, count = divide_batch(args[argnum], dim, size, count)
    except ValueError as error:
        raise ValueError(f"{error} (argument {argnum} is sliced: argnum={argnum})") from None
    if count % (spec.per_call or 1):
        fitting = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"microbatch: per_call={spec.per_call} does not divide {count} microbatches: {fitting} do"
        )
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = tuple(leaf for leaf in leaves if is_node(leaf))
    graphdef, nnx_state = nnx.split(nodes, graph=True)
    held, state_def = jax.tree.flatten(nnx_state)
    references = {n: x for n, x in enumerate(held) if isinstance(x, jax.Ref)}
    state = [x for n, x in enumerate(held) if n not in references]
    call = _Call(fun, argnum, arg_shardings, leaves, treedef, graphdef, state_def, references)
    slices = jax.tree.map(lambda x: slice_batch(x, dim, size, count), args[argnum])
    body = (_call_once if _compat.jit_is_disabled() else _trace)(call, state, slices)
    reduced = reductions(reduce, body.results)
    after, accumulators, stacks = _scan(body, state, slices, count, reduced, spec)
    if any(body.changes):  # a model that a transformation of JAX closes over can only be read
        nnx.update(nodes, call.nnx_state(after))
    finished = [r.finish(a, s, count, dim) for r, a, s in zip(reduced, accumulators, stacks)]
    return jax.tree.unflatten(jax.tree.structure(body.results), finished)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The user's function as a function over arrays: the state of its NNX objects, and a slice.

    Attributes:
      leaves, treedef: the arguments of the loop, taken apart; NNX objects are leaves.
      graphdef, state_def: structure of those NNX objects, and of their state.
      references: those among their state, by number. `fun` reads and writes them where they are.
    """

    fun: Callable[..., Any]
    argnum: int
    arg_shardings: Any
    leaves: Sequence[Any]
    treedef: Any
    graphdef: Any
    state_def: Any
    references: dict[int, Any]

    def nnx_state(self, state: Sequence[Any]) -> Any:
        """The state of the NNX objects, of its arrays and the references."""
        arrays = iter(state)
        numbers = range(len(state) + len(self.references))
        whole = [self.references[n] if n in self.references else next(arrays) for n in numbers]
        return jax.tree.unflatten(self.state_def, whole)

    def _arguments(self, nodes: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments of `fun`, with these NNX objects."""
        node = iter(nodes)
        leaves = [next(node) if is_node(leaf) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def __call__(self, state: Sequence[Any], piece: Any) -> tuple[Any, list[Any]]:
        """(the results of `fun` for one microbatch, the state after it).

        Raises:
          ValueError: if `fun` changes the structure of an NNX object.
        """
        nodes = nnx.merge(self.graphdef, self.nnx_state(state))
        args, kwargs = self._arguments(nodes)
        if self.arg_shardings is not None:
            piece = constrain_slice(piece, self.arg_shardings)
        results = self.fun(*args[: self.argnum], piece, *args[self.argnum + 1 :], **kwargs)
        graphdef, after = nnx.split(nodes, graph=True)
        if not _compat.same_graph(graphdef, self.graphdef):
            before = self._arguments(nnx.merge(self.graphdef, self.nnx_state(state)))
            found = first_few(changes(before, (args, kwargs)), most=3) or "the structure of its arguments"
            raise ValueError(
                f"microbatch: the function changes {printable(found)}. Every microbatch must leave all but "
                "arrays as it was: make modules and set attributes before the loop, as one call of the model "
                "there may do, and count in a Variable"
            )
        return results, [x for x in jax.tree.leaves(after) if not isinstance(x, jax.Ref)]


@dataclasses.dataclass(frozen=True)
class _Body:
    """What a loop does for each microbatch.

    Attributes:
      run: from state and a slice to (flat results, state after it).
      results: shapes and dtypes of what the function returns.
      changes: for each array of the state, whether the function changes it.
    """

    run: Callable[[Sequence[Any], Any], tuple[list[Any], list[Any]]]
    results: Any
    changes: list[bool]


def _trace(call: _Call, state: Sequence[Any], slices: Any) -> _Body:
    """Traces a call for the first slice."""
    first = jax.eval_shape(lambda slices: jax.tree.map(lambda x: x[0], slices), slices)

    @functools.wraps(call.fun, updated=())  # JAX's errors name the function and its line
    def microbatch(state: Sequence[Any], piece: Any) -> tuple[Any, list[Any]]:
        return call(state, piece)

    microbatch.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    try:
        jaxpr, (results, _) = jax.make_jaxpr(microbatch, return_shape=True)(state, first)
    except (ValueError, TraceContextError) as error:
        if "different trace level" in str(error):
            error.add_note(CLOSED_OVER)
        raise
    count = len(jax.tree.leaves(results))

    def run(state: Sequence[Any], piece: Any) -> tuple[list[Any], list[Any]]:
        made = jex.jaxpr_as_fun(jaxpr)(*jax.tree.leaves((state, piece)))
        return made[:count], made[count:]

    changes = [source != n for n, source in enumerate(forwarded(jaxpr)[count:])]
    return _Body(run, results, changes)


def _call_once(call: _Call, state: Sequence[Any], slices: Any) -> _Body:
    """Calls the function for the first slice, to see what it returns; the loop calls it for that slice again.

    Under `jax.disable_jit` the function may look at values, which a trace does not have.
    """
    results, after = call(state, jax.tree.map(lambda x: x[0], slices))

    def run(state: Sequence[Any], piece: Any) -> tuple[list[Any], list[Any]]:
        results, after = call(state, piece)
        return jax.tree.leaves(results), after

    changes = [new is not old for new, old in zip(after, state)]
    return _Body(run, jax.eval_shape(lambda: results), changes)


def _scan(
    body: _Body,
    state: Sequence[Any],
    slices: Any,
    count: int,
    reduced: Sequence[Reduction],
    spec: LoopSpec,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs the loop.

    Returns:
      The state after it; for each reduction its accumulator, and its stacked results; None where it has none.
    """

    def whole(carried: Sequence[Any]) -> list[Any]:
        """All state: what is carried, and what no microbatch changes."""
        return [s if c is None else c for c, s in zip(carried, state)]

    def step(carry: tuple[list[Any], list[Any]], piece: Any) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
        carried, accumulators = carry
        results, after = body.run(whole(carried), piece)
        folded = [r.step(a, x) for r, a, x in zip(reduced, accumulators, results)]
        carried = [s if changes else None for s, changes in zip(after, body.changes)]
        return (carried, [a for a, _ in folded]), [stacked for _, stacked in folded]

    init = [s if changes else None for s, changes in zip(state, body.changes)], [r.init() for r in reduced]
    try:
        with jax.named_scope(loop_scope(spec)):
            (carried, accumulators), stacks = jax.lax.scan(step, init, slices, length=count)
    except ValueError as error:
        advise(
            error,
            "A loop over state on several meshes is for mm.jit: call it, and all that is around it, in a "
            "function that mm.jit compiles",
        )
        raise
    return whole(carried), accumulators, stacks
