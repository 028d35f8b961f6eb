"""A 1F1B pipeline written out over jitted stage functions, as fast as we know how to write it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from contenders.contender import Contender, by_path
from contenders.problem import OPTIMIZER, Problem


class Part(nnx.Module):
    """What one stage has of the model: a run of its blocks, and some of what lies beside them."""

    def __init__(self, model: Any, blocks: Sequence[Any], attributes: Sequence[str]):
        self.blocks = nnx.List(blocks)
        for name in attributes:
            setattr(self, name, getattr(model, name))


class Stage:
    """A part of the model on one device, and the four programs it takes to train it.

    `forward` returns its output and what `backward` needs of it, parameters left out; `backward` adds
    into the gradients it was given, in place. The last stage does both at once; the first has no use for
    the gradient of its input. Parameters travel as flat lists, which cost the least to pass.
    """

    def __init__(self, problem: Problem, part: Part, device: jax.Device, is_first: bool):
        graphdef, state = nnx.split(part)
        params, treedef = jax.tree.flatten(state)
        self.device = device
        self.treedef = treedef
        self.params = jax.device_put(params, device)
        self.moments = jax.device_put(OPTIMIZER.init(self.params), device)
        pullback = None

        def apply(params, x):
            part = nnx.merge(graphdef, treedef.unflatten(params))
            x = problem.first(part, x) if is_first else x
            for block in part.blocks:
                x = problem.block(block, x)
            return x

        def loss_of(params, x, batch):  # its part in the mean over microbatches
            part = nnx.merge(graphdef, treedef.unflatten(params))
            return problem.last(part, apply(params, x), batch) / problem.microbatches

        @jax.jit
        def forward(params, x):
            nonlocal pullback
            y, vjp = jax.vjp(lambda p: apply(p, x), params) if is_first else jax.vjp(apply, params, x)
            leaves, structure = jax.tree.flatten(vjp)
            position = {id(param): i for i, param in enumerate(params)}
            pullback = structure, [position.get(id(leaf)) for leaf in leaves]
            return y, [leaf for leaf in leaves if id(leaf) not in position]

        def add(gradients, more):
            return more if gradients is None else jax.tree.map(jnp.add, gradients, more)

        def backward(params, residuals, dy, gradients):
            structure, positions = pullback
            rest = iter(residuals)
            leaves = [next(rest) if i is None else params[i] for i in positions]
            more, *dx = structure.unflatten(leaves)(dy)
            return dx, add(gradients, more)

        def both(params, x, batch, total):
            argnums = (0,) if is_first else (0, 1)
            loss, (gradients, *dx) = jax.value_and_grad(loss_of, argnums)(params, x, batch)
            return dx, add(total, (loss, gradients))

        def update(params, moments, gradients):
            updates, moments = OPTIMIZER.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        self.forward = forward
        self.backward = jax.jit(backward, donate_argnums=3)
        self.both = jax.jit(both, donate_argnums=3)
        self.update = jax.jit(update, donate_argnums=(0, 1))


def one_f_one_b(stages: int, microbatches: int) -> Iterator[tuple[int, str, int]]:
    """Yields (stage, "forward" | "backward", microbatch) in an order that can be dispatched as it is."""
    queues = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        forwards = [(stage, "forward", i) for i in range(microbatches)]
        backwards = [(stage, "backward", i) for i in range(microbatches)]
        steady = [job for pair in zip(backwards, forwards[ahead:]) for job in pair]
        queues.append(collections.deque(forwards[:ahead] + steady + backwards[microbatches - ahead :]))
    done = set()
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            _, phase, i = queue[0]
            if phase == "forward":
                ready = stage == 0 or (stage - 1, "forward", i) in done
            else:
                ready = stage == stages - 1 or (stage + 1, "backward", i) in done
            if ready:
                done.add(queue[0])
                yield queue.popleft()


def by_hand(problem: Problem, devices: Sequence[jax.Device]) -> Contender:
    model = problem.make()
    depth, last = len(model.blocks) // problem.stages, problem.stages - 1
    stages = []
    for s, device in enumerate(devices):
        attributes = (problem.before if s == 0 else ()) + (problem.after if s == last else ())
        part = Part(model, list(model.blocks)[s * depth : (s + 1) * depth], attributes)
        stages.append(Stage(problem, part, device, is_first=s == 0))
    order = list(one_f_one_b(problem.stages, problem.microbatches))

    def step(batch):
        leaves, tree = jax.tree.flatten(batch)
        slices = zip(*(np.split(leaf, problem.microbatches) for leaf in leaves))
        inputs = [tree.unflatten(slice) for slice in slices]
        activations = {(0, i): slice for i, slice in enumerate(inputs)}
        cotangents, residuals = {}, {}
        totals = [None] * problem.stages
        for s, phase, i in order:
            stage = stages[s]
            if s == last:
                if phase == "backward":
                    x = activations.pop((s, i))
                    dx, totals[s] = stage.both(stage.params, x, inputs[i], totals[s])
            elif phase == "forward":
                y, residuals[s, i] = stage.forward(stage.params, activations.pop((s, i)))
                activations[s + 1, i] = jax.device_put(y, stages[s + 1].device)
            else:
                dx, totals[s] = stage.backward(
                    stage.params, residuals.pop((s, i)), cotangents.pop((s, i)), totals[s]
                )
            if phase == "backward" and s > 0:
                cotangents[s - 1, i] = jax.device_put(dx[0], stages[s - 1].device)
        loss, totals[last] = totals[last]
        for stage, gradients in zip(stages, totals):
            stage.params, stage.moments = stage.update(stage.params, stage.moments, gradients)
        return loss

    def moment():
        found = {}
        for s, stage in enumerate(stages):
            mu = stage.treedef.unflatten(stage.moments[0].mu)
            found.update(by_path(nnx.to_flat_state(mu), shift=s * depth))
        return found

    return Contender(
        "by hand", step, lambda: jax.tree.leaves([(s.params, s.moments) for s in stages]), moment
    )
