"""The inputs and outputs of each Module when a model is called, found by an abstract trace."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from mmnnx.inspect.model_state import array_text, is_array
from mmnnx.mpmd.jit.contexts import ignore_transforms
from mmnnx.sharding.path_filter import Path, path_text

LINES = 6
"""Lines for the inputs, or the outputs, of one call."""

_TAG = "_mmnnx_call_tag"
_recording: ContextVar[_Recorder | None] = ContextVar("mmnnx_recording_calls", default=None)
_lock = threading.RLock()  # classes are changed while a model is traced


@dataclass(frozen=True)
class Call:
    """One call of a Module: a line for each input and each output, at most `LINES` each."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def record_calls(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "__call__"
) -> dict[Path, list[Call]]:
    """The calls of Modules while ``model.method(*args, **kwargs)`` runs, by path, in the order they begin.

    Nothing is computed. The path of `model` itself is (). Calls of a Module with the same types count once.
    Inside `nnx.vmap` and `nnx.scan` shapes are those of one iteration.

    Args:
      model: an NNX object with real or abstract arrays. It is not changed.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s and NNX objects are traced; other values, such as a Python
        bool, are passed as they are.

    Raises:
      TypeError: there is no such method.
    """
    if not callable(getattr(model, method, None)):
        raise TypeError(
            f"{type(model).__name__} has no method {method!r} that could take these inputs: leave them out, "
            "or name a method with method="
        )
    try:
        return _trace(model, args, kwargs, method, distinct=True)
    except Exception as error:
        try:
            # Tags make equal Modules differ, and the model may need them equal, to stack them for example.
            return _trace(model, args, kwargs, method, distinct=False)
        except Exception:
            error.add_note(f"while {type(model).__name__}.{method} was traced with the inputs of mm.tabulate")
            raise error from None


def _trace(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: str, *, distinct: bool
) -> dict[Path, list[Call]]:
    recorder = _Recorder(distinct)
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=nnx.graph.is_graph_node)
    objects = {n: x for n, x in enumerate(leaves) if nnx.graph.is_graph_node(x)}
    arrays = {n: _shape_of(x) for n, x in enumerate(leaves) if is_array(x)}
    graphdef, state = nnx.split((model, objects), graph=True)

    def run(state: Any, arrays: dict[int, Any]) -> None:
        copied, copies = nnx.merge(graphdef, state)
        given = [copies.get(n, arrays.get(n, x)) for n, x in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, given)
        recorder.tag(copied)
        with recorder.record((), args, kwargs) as done:
            done(getattr(copied, method)(*args, **kwargs))

    token = _recording.set(recorder)
    try:
        with _lock, _recorded_classes(model), ignore_transforms():
            jax.eval_shape(run, jax.tree.map(_shape_of, state), arrays)
    finally:
        _recording.reset(token)
    return recorder.calls


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x


class _Tag:
    """The path of a Module, as a static attribute, which every transformation carries along to copies.

    Tags of two traces differ: otherwise JAX would not trace a jitted function again in the second one.
    """

    def __init__(self, path: Path, recorder: _Recorder):
        self.path = path
        self._key = (id(recorder), path if recorder.distinct else None)
        self._recorder = recorder  # kept alive, so that no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tag) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@dataclass
class _Recorder:
    """The calls that one trace has made."""

    distinct: bool
    calls: dict[Path, list[Call]] = field(default_factory=dict)
    _open: list[Path] = field(default_factory=list)

    def tag(self, model: Any) -> None:
        for path, node in list(nnx.iter_graph(model, graph=True)):
            if _can_be_called(node):
                setattr(node, _TAG, _Tag(path, self))

    @contextlib.contextmanager
    def record(self, path: Path, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """Yields a function to be called with the outputs."""
        calls = self.calls.setdefault(path, [])  # paths are in the order in which calls begin
        inputs = _lines((*args, *([kwargs] if kwargs else [])))

        def done(outputs: Any) -> None:
            call = Call(inputs, _lines(outputs))
            if call not in calls:
                calls.append(call)

        self._open.append(path)
        try:
            yield done
        finally:
            self._open.pop()

    def within(self, path: Path) -> bool:
        """Whether that Module is being called, so that a `super().__call__()` is not recorded."""
        return path in self._open


def _can_be_called(node: Any) -> bool:
    return isinstance(node, nnx.Module) and any("__call__" in vars(base) for base in type(node).__mro__)


@contextlib.contextmanager
def _recorded_classes(model: Any) -> Iterator[None]:
    """Inside, every `__call__` of the classes in `model` is recorded by the recorder of this context."""
    found = {type(node) for _, node in nnx.iter_graph(model, graph=True) if _can_be_called(node)}
    name = "__call__"
    bases = {base for cls in found for base in cls.__mro__}
    originals = {base: vars(base)[name] for base in bases if name in vars(base)}
    try:
        for cls, original in originals.items():
            type.__setattr__(cls, name, _recorded(original))
        yield
    finally:
        for cls, original in originals.items():
            type.__setattr__(cls, name, original)


def _recorded(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, tag = _recording.get(), getattr(self, _TAG, None)
        bound = original.__get__(self, type(self))
        if recorder is None or tag is None or recorder.within(tag.path):
            return bound(*args, **kwargs)
        with recorder.record(tag.path, args, kwargs) as done:
            outputs = bound(*args, **kwargs)
            done(outputs)
            return outputs

    return call


def _lines(tree: Any) -> tuple[str, ...]:
    """A line for each leaf, with the names (not the numbers) in its path in front."""
    lines = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=nnx.graph.is_graph_node)[0]:
        names = [str(name) for key in path if isinstance(name := _name(key), str)]
        node = nnx.graph.is_graph_node(x)
        text = array_text(x) if is_array(x) else type(x).__name__ if node else repr(x)
        text = text if len(text) <= 40 else text[:39] + "…"
        lines.append(f"{path_text(names)}: {text}" if names else text)
    if len(lines) > LINES:
        lines[LINES - 1 :] = [f"… {len(lines) - LINES + 1} more"]
    return tuple(lines)


def _name(key: Any) -> Any:
    """The key, index or attribute in one entry of a JAX path."""
    return next((getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)), None)
