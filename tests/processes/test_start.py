"""Processes meet before they start, or say why they cannot."""

from __future__ import annotations

import asyncio
import socket
import sys

import jax
import pytest

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.distributed import rendezvous
from mmnnx.mpmd.distributed.initialize import _bind_address
from mmnnx.mpmd.distributed.rendezvous import host, join, split_address
from tests.processes.harness import finish, free_port, start


def meet(*members, port=None, timeout=0.5):
    """What `host` (for number 0) or `join` returned or raised for each (number, count)."""

    async def all_of_them():
        address = f"127.0.0.1:{port or free_port()}"
        return await asyncio.gather(
            *(
                host(address, count, timeout) if number == 0 else join(address, number, count, timeout)
                for number, count in members
            ),
            return_exceptions=True,
        )

    return asyncio.run(all_of_them())


def test_processes_that_meet_know_each_other():
    found = meet((2, 3), (0, 3), (1, 3), timeout=20)
    for members in found:
        assert [m.number for m in members] == [0, 1, 2]
        assert {m.host for m in members} == {socket.gethostname()}
    assert [m.streams is not None for m in found[1]] == [False, True, True]
    assert found[0][2].address == found[1][0].address == found[2][1].address == "127.0.0.1"


def test_a_process_next_to_process_0_is_reached_as_that_is(monkeypatch):
    """By its host's name it reaches process 0 on loopback, where those of other hosts find neither."""
    ends = iter(["127.0.1.1", "10.0.0.5", "127.0.1.1", "10.0.0.6"])  # of process 0 to both, and theirs
    monkeypatch.setattr(rendezvous, "_own_end", lambda member: next(ends))
    zero, first, second = meet((0, 3), (1, 3), (2, 3), timeout=20)
    assert zero[0].address == "10.0.0.5"
    assert {first[1].address, second[2].address} == {"10.0.0.5", "10.0.0.6"}


def test_processes_that_do_not_come_are_named_by_all_others():
    for error in meet((0, 4), (2, 4)):
        assert isinstance(error, TimeoutError)
        assert "processes 1 and 3 of 4 did not come in 0.5 s: start every process" in str(error)


def test_without_process_0_the_others_say_where_they_looked():
    port = free_port()
    (error,) = meet((1, 2), port=port)
    assert isinstance(error, TimeoutError)
    assert f"nobody listening at 127.0.0.1:{port}" in str(error)


@pytest.mark.slow
def test_a_coordinator_whose_name_has_no_address():
    with pytest.raises(
        TimeoutError, match="process 1 found no address of nohost.invalid .*invalid:4000, the"
    ):
        asyncio.run(rendezvous.join("nohost.invalid:4000", 1, 2, 0.1))


@pytest.mark.parametrize("count, other", [(2, 3), (3, 2)], ids=["more", "fewer"])
def test_processes_of_different_counts_do_not_start(count, other):
    for error in meet((0, count), (1, other), timeout=5):
        assert isinstance(error, ValueError)
        assert f"was started as one of {other} processes, and process 0" in str(error)


def test_a_number_that_is_there_twice_is_told_apart():
    errors = meet((0, 3), (1, 3), (1, 3), timeout=20)
    assert all(isinstance(e, ValueError) and "process 1 was started twice" in str(e) for e in errors)


def test_a_process_may_be_started_again_while_the_others_wait():
    """Whoever has gone before all were there does not count."""

    async def scene():
        address = f"127.0.0.1:{free_port()}"
        zero = asyncio.create_task(host(address, 3, 20))
        first = asyncio.create_task(join(address, 1, 3, 20))
        await asyncio.sleep(0.3)
        first.cancel()
        await asyncio.sleep(0.1)
        return await asyncio.gather(zero, join(address, 1, 3, 20), join(address, 2, 3, 20))

    assert [len(members) for members in asyncio.run(scene())] == [3, 3, 3]


def test_as_many_hosts_as_there_may_be(monkeypatch):
    """Process 0 names all of them in one line, here two with names as long as those of a thousand."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 50_000)
    assert [len(members) for members in meet((0, 2), (1, 2), timeout=20)] == [2, 2]


@pytest.mark.parametrize("said", ["5", '{"process": 1, "host": "h", "pid": 7}'], ids=["number", "no count"])
def test_a_stranger_that_speaks_json(caplog, said):
    """It is shown the door, and nobody is shown a traceback."""

    async def scene():
        port = free_port()
        zero = asyncio.create_task(host(f"127.0.0.1:{port}", 2, 20))
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said.encode() + b"\n")
        closed = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return closed, await asyncio.gather(zero, join(f"127.0.0.1:{port}", 1, 2, 20))

    closed, found = asyncio.run(scene())
    assert closed == b"" and not caplog.records
    assert [len(members) for members in found] == [2, 2]


def test_strangers_are_not_taken_for_processes():
    async def scene():
        port = free_port()
        zero = asyncio.create_task(host(f"127.0.0.1:{port}", 2, 20))
        await asyncio.sleep(0.1)
        silent = await asyncio.open_connection("127.0.0.1", port)
        _, loud = await asyncio.open_connection("127.0.0.1", port)
        loud.write(b"GET / HTTP/1.1\r\n\r\n")
        found = await asyncio.gather(zero, join(f"127.0.0.1:{port}", 1, 2, 20))
        silent[1].close()
        return found

    assert [len(members) for members in asyncio.run(scene())] == [2, 2]


@pytest.mark.parametrize(
    "variables, arguments, message",
    [
        ({}, {}, "does not know coordinator_address .*num_processes .*process_id .*JAX found no cluster"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, {}, r"does not know coordinator_address \(JAX_C"),
        ({"JAX_NUM_PROCESSES": "two"}, {}, "JAX_NUM_PROCESSES is 'two': it must be a number"),
        (
            {},
            {"coordinator_address": "h:1", "num_processes": 2},
            r"does not know process_id \(JAX_PROCESS_ID",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2"},
            {"process_id": 2},
            "ids go from 0 to num",
        ),
        ({}, {"coordinator_address": "h", "num_processes": 2, "process_id": 0}, "'h' is not an address"),
        ({}, {"coordinator_address": "h:1", "num_processes": "2"}, "num_processes='2': it must be a number"),
        ({}, {"num_processes": 1, "process_id": 1}, "process_id=1 with num_processes=1"),
        ({}, {"num_processes": 1, "failure_timeout": 0.5}, "failure_timeout=0.5: a process that works may"),
        ({}, {"timeout": None}, "timeout=None: it is a number of seconds, above 0 and less than a day"),
        ({}, {"timeout": "60"}, "timeout='60': it is a number of seconds"),
        ({}, {"failure_timeout": float("nan")}, "failure_timeout=nan: it is a number of seconds"),
        ({}, {"initialization_timeout": float("inf")}, "initialization_timeout=inf: it is a number"),
        ({}, {"coordinator_address": "h:0", "num_processes": 2, "process_id": 0}, "'h:0' is not an address"),
    ],
)
def test_what_is_missing_or_wrong_is_said_before_anything_runs(monkeypatch, variables, arguments, message):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        mm.initialize(**arguments)


@pytest.mark.parametrize("number", [-1, 2, 3])
def test_a_process_is_one_of_those_that_there_are(number):
    with pytest.raises(ValueError, match=rf"process_id={number} with num_processes=2: ids go from 0 to num"):
        mm.initialize("127.0.0.1:1", 2, number, initialization_timeout=1)


def test_one_process_needs_no_coordinator(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    mm.initialize()
    mm.initialize(process_id=0)
    assert not jax.distributed.is_initialized()


def test_it_is_too_late_once_jax_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match="comes too late: JAX has started"):
        mm.initialize("127.0.0.1:1", 2, 0)


def test_a_coordinator_on_loopback_listens_there_alone():
    assert _bind_address("127.0.0.1:80") == "127.0.0.1:80"
    assert _bind_address("localhost:80") == "127.0.0.1:80"
    assert _bind_address("[::1]:80") == "[::1]:80"
    assert _bind_address("192.0.2.1:80") == "[::]:80"
    assert _bind_address(f"{socket.gethostname()}:80") == "[::]:80"  # whatever this host calls itself
    assert split_address("[::1]:80") == ("::1", 80)


@pytest.mark.slow
def test_real_processes_without_one_of_them_end_in_time():
    """Each with the message, none by JAX's abort, and none is left."""
    results = finish(start("rendezvous.py", 3, 1, without=[1]), timeout=90)  # what is left then is killed
    for status, printed in results:
        assert status == 1
        assert printed.count("TimeoutError: process 1 of 3 did not come in 6 s") == 1
        assert "coordination" not in printed


@pytest.mark.slow
def test_what_real_processes_get_from_the_environment():
    """With all there: they start, from variables alone, and are told when they start twice."""
    for number, (status, printed) in enumerate(finish(start("rendezvous.py", 2, 1), timeout=60)):
        assert status == 0, printed
        assert f"process {number} of 2" in printed
        assert "RuntimeError: mm.initialize was called before: call it once" in printed
        if sys.platform == "linux":
            assert "listens at: ['127.0.0.1']" in printed


def test_slurm_says_who_we_are(monkeypatch):
    """As JAX reads it; what was given stays."""
    for name, value in {
        "JOB_ID": "70000",
        "STEP_NODELIST": "node[3-6]",
        "NTASKS": "4",
        "PROCID": "2",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    coordinator, *others = _compat.detect_cluster(None, None, None, None, None, 300)
    assert coordinator.startswith("node3:") and others == [4, 2, [0]]
    given = ("node9:1", 3, 1, [5])
    assert _compat.detect_cluster(*given, None, 300) == given
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    assert _compat.detect_cluster("node9:1", 3, 1, None, "deactivate", 300) == ("node9:1", 3, 1, [2, 3])
