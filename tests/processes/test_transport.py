"""By which way arrays go to other processes, and where they are handed over."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mmnnx import _compat
from mmnnx.mpmd.distributed import processes as distributed_processes
from mmnnx.mpmd.distributed import progress, transport
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.mpmd.runtime import across_processes, transfers


def sharding(*processes, shape=None):
    """Something like a sharding over devices of these processes, one each."""
    devices = np.array([SimpleNamespace(process_index=p) for p in processes]).reshape(shape or -1)
    return SimpleNamespace(device_set=list(devices.flat), mesh=SimpleNamespace(devices=devices))


def way(source, target):
    return transport.goes_by_device_put.__wrapped__(source, target)


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    monkeypatch.setattr(transport, "holders", holders.__wrapped__)
    monkeypatch.setattr(distributed_processes, "is_described", lambda device: False)


def test_device_put_where_the_client_can_and_shards_are_equal(monkeypatch):
    monkeypatch.setattr(_compat, "copies_between_processes", lambda: True)
    assert way(sharding(0, 0), sharding(1, 1))
    assert way(sharding(0, 1), sharding(1, 2))
    assert not way(sharding(0, 0), sharding(1))  # another number of shards
    assert not way(sharding(0, 1, 0, 1, shape=(2, 2)), sharding(2, 2, 3, 3))
    assert not way(sharding(0, 1), sharding(1, 0))  # JAX takes it for a move inside its processes


def test_sockets_where_it_can_not(monkeypatch):
    monkeypatch.setattr(_compat, "copies_between_processes", lambda: False)
    assert not way(sharding(0, 0), sharding(1, 1))
    monkeypatch.undo()
    assert not _compat.copies_between_processes(), "the CPU client has no such thing"


def test_a_copy_asks_for_the_way(monkeypatch):
    """`transfer` hands an array to `device_put` or to `send` and `receive`, as `goes_by_device_put` says."""
    devices = jax.devices()
    source, target = (NamedSharding(Mesh(np.array(d), ("x",)), P("x")) for d in (devices[:2], devices[2:4]))
    x = jax.device_put(np.arange(4.0), source)
    asked = []
    monkeypatch.setattr(transport, "device_put", lambda array, to: asked.append((array, to)) or "copied")
    monkeypatch.setattr(transport, "goes_by_device_put", lambda *_: True)
    assert across_processes.copy_across(x, source, target) == "copied"
    assert asked[0][0] is x and asked[0][1] is target
    monkeypatch.setattr(transport, "goes_by_device_put", lambda *_: False)
    assert across_processes.copy_across(x, source, target).sharding == target
    assert len(asked) == 1


def test_arrays_of_another_program_call_or_step_have_another_ticket(monkeypatch):
    """Also where one process has a function to itself: what the other sends it is of another program."""

    def ticket(step, program, call):
        monkeypatch.setattr(progress.current, "step", step)
        monkeypatch.setattr(progress.current, "call", (program, call))
        return transport._ticket(1, 1)

    places = [(3, 0, 1), (4, 0, 1), (3, 1, 1), (3, 0, 2)]
    assert len({ticket(*place) for place in places}) == len(places)
    assert [ticket(*place) for place in places] == [ticket(*place) for place in places]


@pytest.mark.parametrize(
    "asked, host, port",
    [
        ("10.0.0.1", "10.0.0.1", 0),
        ("10.0.0.1:7000", "10.0.0.1", 7000),
        ("::1", "::1", 0),
        ("[::1]", "::1", 0),
        ("[::1]:7000", "::1", 7000),
        ("node7:7000", "node7", 7000),
    ],
)
def test_the_address_that_was_asked_for(monkeypatch, asked, host, port):
    monkeypatch.setattr(transport, "_listen_address", None)
    transport.listen_at(asked)
    assert transport._listen_address == (host, port)


def test_a_bad_address_is_an_error_at_once():
    with pytest.raises(ValueError, match="'10.0.0.1:many' is not an address"):
        transport.listen_at("10.0.0.1:many")


def test_a_key_among_arrays_for_another_process(monkeypatch):
    """The giver hands the arrays over in one message and the key by itself, and gets nothing back."""
    devices = jax.devices()
    source, target = (NamedSharding(Mesh(np.array([d]), ("x",)), P()) for d in devices[:2])
    arrays = [jax.device_put(x, source) for x in (np.arange(4.0), jax.random.key(0), np.ones(2))]
    handed = []
    monkeypatch.setattr(transfers, "holders", lambda s: {int(s is target)})
    monkeypatch.setattr(transport, "goes_by_device_put", lambda *_: False)
    monkeypatch.setattr(transport, "send", lambda process, arrays: handed.append((process, list(arrays))))
    monkeypatch.setattr(transfers, "copy_across", lambda array, *_: handed.append(array))
    transfers.sender([(source, target, x.aval) for x in arrays])(*arrays)
    (process, together), key = handed
    assert process == 1 and together[0] is arrays[0] and together[1] is arrays[2] and key is arrays[1]
