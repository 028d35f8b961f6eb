"""`mm.fetch`: values on every process, wherever their arrays live."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from mmnnx.mpmd.distributed import key_value, progress
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.sharding.divided_array import DividedArray

_BLOCK = 8  # fetches whose values are removed from the store together
_END = b"\0"  # of the words before the arrays
_fetches = itertools.count()


def fetch(tree: Any) -> Any:
    """The values of arrays on every process that runs the program, wherever the arrays live.

    It waits for them. Meant for losses and metrics: what is elsewhere comes through the coordinator.

    Args:
      tree: a pytree of arrays; in several processes each must call it, with the same, in the same order, so
        from one thread alone. What is on JAX's default device is taken as each process has it.

    Returns:
      The same tree with NumPy arrays; of typed PRNG keys, their words.

    Raises:
      ValueError: if another process fetches other arrays, or at another place of the run, as where it called
        this once more than the others. Types and the latest call of a program are compared, not what arrays
        are of; other threads than the main one compare types alone.

    Example:
      >>> loss = mm.fetch(train_step(model, optimizer, batch))
    """
    if any(isinstance(x, DividedArray) for x in jax.tree.leaves(tree)):
        pieces = fetch(jax.tree.map(lambda x: list(x.pieces) if isinstance(x, DividedArray) else x, tree))
        put_together = lambda x, own: np.concatenate(own, axis=x.dim) if isinstance(x, DividedArray) else own
        return jax.tree.map(put_together, tree, pieces)
    tree = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)
    leaves = jax.tree.leaves(tree)
    apart = [x for x in leaves if _is_apart(x)]
    values = iter(_gather(apart) if apart else ())
    return jax.tree.map(lambda x: next(values) if _is_apart(x) else _own(x), tree)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_apart(x: Any) -> bool:
    """Whether an array is not whole in every process."""
    if not isinstance(x, jax.Array) or jax.process_count() == 1:
        return False
    if x.is_fully_addressable and not isinstance(x.sharding, NamedSharding):
        return False  # on JAX's default device, which each process has one of
    return not (x.is_fully_replicated and len(holders(x.sharding)) == jax.process_count())


def _own(x: Any) -> np.ndarray:
    whole = not isinstance(x, jax.Array) or x.is_fully_addressable
    return np.asarray(x if whole else x.addressable_data(0))


def _gather(arrays: list[jax.Array]) -> list[np.ndarray]:
    """The values of arrays of which each process has some part or none; all call it, in one order.

    Each process puts all that it has into one value of the key-value store.
    """
    here, block_number = jax.process_index(), divmod(next(_fetches), _BLOCK)
    key = "fetch/{}/{}".format(*block_number)
    parts = [list(_parts(x)) for x in arrays]
    shards = [{s.device: s.data for s in x.addressable_shards} for x in arrays]
    own = [np.asarray(s[d]) for s, ps in zip(shards, parts) for _, d in ps if d.process_index == here]
    what = _what(arrays)
    if own:
        key_value.put(key, b"".join([what.encode(), _END, *(part.tobytes() for part in own)]))
    others = sorted({d.process_index for ps in parts for _, d in ps} - {here})
    received = {p: _check(p, key_value.get(p, key), what) for p in others}
    wholes, mine = [np.empty(x.shape, x.dtype) for x in arrays], iter(own)
    for x, whole, ps in zip(arrays, wholes, parts):
        for index, device in ps:
            if device.process_index == here:
                whole[index] = next(mine)
                continue
            size, raw = whole[index].nbytes, received[device.process_index]
            whole[index] = np.frombuffer(raw[:size], x.dtype).reshape(whole[index].shape)
            received[device.process_index] = raw[size:]
    _forget(*block_number)
    return wholes


def _what(arrays: Sequence[jax.Array]) -> str:
    """What is fetched and when, in words: it is the same in all processes."""
    types = ", ".join(x.aval.str_short() for x in arrays)
    if len(types) > 200:
        types = f"{len(arrays)} arrays of {sum(x.nbytes for x in arrays)} bytes"
    # What another thread logs may be fetched at any time.
    is_main = threading.current_thread() is threading.main_thread()
    return f"{types} at {progress.current}" if is_main else types


def _check(process: int, value: bytes, what: str) -> memoryview:
    """The arrays that a process sends, if they are what this one fetches."""
    end = value.index(_END)
    if (other := value[:end].decode()) != what:
        raise ValueError(
            f"mm.fetch: process {process} fetches {other}, and process {jax.process_index()} {what}: every "
            "process has to fetch the same arrays, in the same order"
        )
    return memoryview(value)[end + len(_END) :]


def _forget(block: int, number: int) -> None:
    """Removes a block of fetches from the store when all processes have read it, which none waits for."""
    store, read = key_value.store(), f"mmnnx/read/{block}"
    if number == _BLOCK - 1 and store.key_value_increment(read, 1) == jax.process_count():
        for p in range(jax.process_count()):
            store.key_value_delete(f"mmnnx/{p}/fetch/{block}/")
        store.key_value_delete(read)


def _parts(x: jax.Array) -> Any:
    """The distinct parts of an array: (index, the first device that has it)."""
    found: dict[str, Any] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        found.setdefault(str(index), (index, device))
    return found.values()
