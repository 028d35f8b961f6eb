"""Runs a pipeline of one stage in each process, until what was asked for goes wrong in one of them."""

import os
import random
import signal
import sys
import threading
import time

import jax.numpy as jnp
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.distributed import transport
from mmnnx.train.checkpoint import Checkpoints, shared

COORDINATOR, HOW = sys.argv[1], sys.argv[4]
COUNT, NUMBER, VICTIM, SEED = (int(sys.argv[n]) for n in (2, 3, 5, 6))


def cut(process, arrays, send=transport.send, seen=[]):  # noqa: B006  # counts the calls
    """Hands over nothing, once."""
    seen.append(process)
    if len(seen) == 10:
        transport.sent[process] += 1
    else:
        send(process, arrays)


mm.initialize(
    COORDINATOR, COUNT, NUMBER, failure_timeout=4, timeout=5 if HOW in ("cut", "shape", "alone") else 60
)
mesh = mm.MultiMesh(axis_sizes=(COUNT,), axis_names=("stage",))
stages = [mm.task(lambda x: jnp.tanh(x) + 1, f"stage{n}", mesh_slice={"stage": n}) for n in range(COUNT)]


@mm.jit(mesh=mesh)
def step(x):
    for stage in stages:
        x = stage(x)
    return x


evaluate = mm.jit(lambda x: stages[-1](stages[0](x)), mesh=mesh)
mine = NUMBER == VICTIM
if mine and HOW == "cut":
    transport.send = cut
for n in range(10**9):
    ones = jnp.ones(999 if mine and HOW == "shape" and n == 20 else 1000)
    if HOW == "values":
        try:
            step(2 * ones if mine else ones)
        except ValueError as error:
            print("refused:", error)
        mm.fetch(step(ones))  # as they are equal now
        break
    out = step(ones)
    for _ in range(2 if mine and HOW == "fetch" and n == 20 else 1):
        mm.fetch(out)
    if HOW == "alone" and (n == 0 or (mine and n == 20)):
        evaluate(jnp.zeros(1000))
    if n == 0:
        print(f"started {time.time()}", flush=True)
        if mine and HOW in ("SIGKILL", "SIGSTOP"):
            delay = random.Random(SEED).uniform(0, 0.5)
            threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, HOW))).start()
    if n == 20:
        if mine and HOW == "raise":
            raise ValueError("the dog ate the batch")
        if mine and HOW == "exit":
            sys.exit(3)
        if HOW in ("save all", "save other steps") or (mine and HOW == "save"):
            number = NUMBER if HOW == "save other steps" else 1
            Checkpoints(sys.argv[7]).save(number, {"rngs": nnx.Rngs(0)})
        if HOW == "raise while it saves":
            with Checkpoints(sys.argv[7]) as checkpoints:
                checkpoints.save(1, {"rngs": nnx.Rngs(0)})
                if mine:
                    raise ValueError("the dog ate the batch")
                while True:
                    mm.fetch(step(ones))
        if HOW == "unshared":
            shared.PATIENCE = 1.0
            Checkpoints(f"{sys.argv[7]}/{NUMBER}").save(1, {"rngs": nnx.Rngs(0)})
        if HOW in ("save", "save all") or (mine and HOW == "early") or HOW == "well":
            break
