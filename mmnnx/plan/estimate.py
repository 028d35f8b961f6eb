"""A language model's step without compiling it: time and memory by formulas, to rank jobs by."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.inspect.schedules import by_name
from mmnnx.modules import LMConfig
from mmnnx.modules.build import build
from mmnnx.mpmd.ir.flops import Product, count_products
from mmnnx.mpmd.ir.timeline import DISPATCH
from mmnnx.plan.chips import CHIPS, Chip
from mmnnx.plan.language_models import TrainingJob, is_of_experts
from mmnnx.plan.targets import TPUS
from mmnnx.sharding.pipeline import balance

OF_RESIDUALS = 0.6  # of what `jax.vjp` keeps of a block is left when cheap operations are computed again


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a job takes, by formulas.

    Attributes:
      job: the job.
      computing: seconds of a step in which the slowest stage computes, or moves data to do so.
      sending: in which it sends to devices of its own mesh.
      idle: in which it waits for other stages, or for the host.
      once: for what is done once a step: gradients over "data", "context" and "expert", the optimizer.
      memory: bytes of a device that has the most weights and the most saved activations of any.
    """

    job: TrainingJob
    computing: float
    sending: float
    idle: float
    once: float
    memory: float

    @property
    def seconds(self) -> float:
        """The step time."""
        return self.computing + self.sending + self.idle + self.once

    @property
    def fits(self) -> bool:
        return self.memory <= _chip(self.job).memory


def estimate(job: TrainingJob) -> Estimate:
    """The time and memory of a job; all stages count as the largest.

    Raises:
      ValueError: for a schedule that cannot be used for these sizes.
    """
    chip, config = _chip(job), job.config
    layer, ends = _parts(config, job.sequence)
    of_layer = layer.weights - layer.experts * _others(job.expert)  # each device has its experts alone
    layers, weights = _largest_stage(config.layers, job.meshes, of_layer, ends.weights)
    weights /= job.tensor
    again = bool(config.remat)  # the backward computes the forward once more
    backward = 2.0 + again

    # A microbatch: products; then sums of activations over "model", two in the forward and in the backward.
    forward = layers * _seconds(layer, job, chip)
    forward = max(forward, forward + _seconds(ends, job, chip) - _seconds(layer, job, chip))
    itemsize = jnp.dtype(config.dtype).itemsize
    activation = job.rows * job.sequence // job.context * config.width * itemsize
    sums = layers * (4 + again) if job.tensor > 1 else 0
    sent = sums * (
        2 * _others(job.tensor) * activation / _link(job, "model") + (job.tensor - 1) * chip.latency
    )
    # Keys and values go around; in the backward with their gradients in float32.
    head_dim = config.head_dim or config.width // config.heads
    keys = 2 * activation * config.kv_heads * head_dim / config.width / job.tensor
    around = layers * (job.context - 1)
    sent += around * (keys * (2 + again + 4 / itemsize) / _link(job, "context") + (3 + again) * chip.latency)
    # Tokens go to the devices of all experts, and what is made of them comes back; in the backward as well.
    exchanges = layers * (4 + again) * (job.expert - 1)
    sent += exchanges * (activation / _link(job, "expert") + chip.latency)

    computing, sending = forward * (1 + backward) * job.microbatches, sent * job.microbatches

    kept = weights / job.data if job.fsdp else weights
    moments = kept * (1 + jnp.dtype(job.moments).itemsize / 4)
    once = 2 * (weights + kept + moments) / chip.bandwidth / chip.of_bandwidth
    # Gradients of experts are summed over the devices that have the same ones.
    experts = layers * layer.experts / job.expert / job.tensor if job.expert > 1 else 0.0
    copies = job.data * job.context
    ways = 1 if job.fsdp else 2  # each device gets its part of the sums alone
    once += (
        ways * (weights - experts) * _others(copies * job.expert) / _link(job, "data", "context", "expert")
    )
    once += ways * experts * _others(copies) / _link(job, "data", "context")
    casts = weights * jnp.dtype(config.dtype).itemsize / 4 if config.dtype != config.param_dtype else 0.0
    if job.fsdp:  # weights come from the other devices before the first microbatch, and stay
        once += (casts or weights) * _others(job.data) / _link(job, "data")
    within = OF_RESIDUALS * layer.saved(job)
    kept_by_block = layer.saved(job) if config.scan else within  # a scan keeps all
    saved = layers * (activation if again else kept_by_block)
    temporary = max(within / config.attention_chunks, 3 * ends.saved(job) / config.loss_chunks)
    state = kept + moments + weights + casts + temporary
    if state + saved > chip.memory:  # with one microbatch at a time: no schedule helps
        return Estimate(job, computing, sending, 0.0, once, state + saved)

    length, held = _schedule(job, backward)
    idle = (computing + sending) * (length / ((1 + backward) * job.microbatches) - 1)
    host = DISPATCH * 4 * job.microbatches * len(job.meshes)  # calls and transfers, forward and backward
    idle = max(idle, host - computing - sending)
    return Estimate(job, computing, sending, idle, once, state + held * saved)


def _chip(job: TrainingJob) -> Chip:
    return CHIPS[job.target.partition(":")[0]]


def _link(job: TrainingJob, *axes: str) -> float:
    """Bytes a second along axes of its mesh: the network's, if one joins GPUs of several hosts."""
    chip, _, topology = job.target.partition(":")
    sizes = list(job.axes.items())
    reach = (
        math.prod(n for _, n in sizes[at:]) for at, (axis, n) in enumerate(sizes) if axis in axes and n > 1
    )
    together = math.inf if chip in TPUS else int(topology.partition("x")[2])
    return CHIPS[chip].network if max(reach, default=1) > together else CHIPS[chip].link


def _others(devices: int) -> float:
    """The share of an array that the other devices have, of so many."""
    return (devices - 1) / devices


def _seconds(part: _Part, job: TrainingJob, chip: Chip) -> float:
    """A microbatch through the forward of a part."""
    bandwidth = chip.bandwidth * chip.of_bandwidth
    products = sum(
        n * max(chip.seconds({dtype: flops}) / chip.of_flops, moved / bandwidth)
        for (dtype, flops, moved), n in part.products.items()
    )
    # Between products, what the backward reads is written.
    written = OF_RESIDUALS * part.saved(job) / bandwidth
    return job.rows / (job.tensor * job.context) * products + written


@functools.lru_cache
def _largest_stage(
    layers: int, meshes: tuple[int, ...], of_layer: float, of_ends: float
) -> tuple[int, float]:
    """The blocks of the mesh that has most weights, and their bytes."""
    sizes = [of_layer] * layers
    sizes[0] += of_ends / 2  # the embedding; the output layer is as large
    sizes[-1] += of_ends / 2
    ends = balance(sizes, len(meshes))
    runs = [sizes[i:j] for i, j in zip([0, *ends], ends)]
    by_mesh = [[run for run, m in zip(runs, meshes) if m == mesh] for mesh in set(meshes)]
    return max((sum(map(len, found)), sum(map(sum, found))) for found in by_mesh)


@functools.lru_cache(maxsize=4096)
def _simulated(
    schedule: str, stages: int, microbatches: int, interleave: int, backward: float
) -> tuple[float, float]:
    # A backward that computes the forward again is not divided: its weight part is next to nothing.
    weight = 1.0 if backward == 2 else 0.0
    costs = {
        "forward": 1.0,
        "backward": backward,
        "backward-input": backward - weight,
        "backward-weight": weight,
    }
    found = by_name(schedule, stages, microbatches, interleave, costs)
    return found.period, max(found.memory)


def _schedule(job: TrainingJob, backward: float) -> tuple[float, float]:
    """The step time in forwards, and the most saved microbatches of a mesh; of many steady ones, by a few."""
    count = job.microbatches
    few = min(count, 2 * job.stages + 2)
    length, held = _simulated(job.schedule, job.stages, few, job.interleave, backward)
    if held > 0.9 * few:  # such as GPipe, which keeps all
        held *= count / few
    return length + (count - few) * (1 + backward), held


@dataclasses.dataclass(frozen=True)
class _Part:
    """One row of a microbatch through a part of a model.

    Attributes:
      products: of the forward, and how many there are of each.
      whole, divided: bytes that the backward reads beside weights: of activations between blocks, which every
        device along "model" has, and of others, of which each has its share.
      rows: of the latter, what is kept only where each device has all experts.
      weights, experts: bytes of its weights, and of the experts among them.
    """

    products: Counter[Product]
    whole: float
    divided: float
    rows: float
    weights: float
    experts: float

    def without(self, other: _Part) -> _Part:
        products = self.products - other.products
        names = ("whole", "divided", "rows", "weights", "experts")
        return _Part(products, *(getattr(self, name) - getattr(other, name) for name in names))

    def saved(self, job: TrainingJob) -> float:
        """Bytes of a device for a microbatch."""
        divided = self.divided - (self.rows if job.rules().get("expert") else 0.0)
        return job.rows * (self.whole + divided / job.tensor) / job.context


@functools.lru_cache
def _parts(config: LMConfig, sequence: int) -> tuple[_Part, _Part]:
    """A block, and all but the blocks: what two have more than one, and what one has more than that."""
    plain: dict[str, Any] = dict(scan=False, remat=False, loss_chunks=1, attention_chunks=1)
    one, two = (_traced(dataclasses.replace(config, layers=n, **plain), sequence) for n in (1, 2))
    layer = two.without(one)
    return layer, one.without(layer)


def _traced(config: LMConfig, sequence: int) -> _Part:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(config)))
    tokens = jax.ShapeDtypeStruct((1, sequence + 1), jnp.int32)

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state).loss(tokens)

    jaxpr = jax.make_jaxpr(loss)(state, tokens)
    weights = jax.tree.leaves(state)
    experts = [v.get_raw_value() for _, v in nnx.to_flat_state(state) if is_of_experts(v, config)]
    shapes = {shape for w in weights for shape in (w.shape, w.shape[::-1])}
    residuals = jax.eval_shape(lambda s, t: jax.vjp(lambda s: loss(s, t), s)[1], state, tokens)
    read = [r for r in jax.tree.leaves(residuals) if r.shape not in shapes]
    whole = [r for r in read if r.shape == (1, sequence, config.width)]
    # The hidden features of experts without a capacity, by token and choice.
    rows = [r for r in read if r.shape == (1, sequence, getattr(config, "top_k", 0), config.mlp)]
    total = lambda arrays: float(sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays))
    divided = total(read) - total(whole)
    return _Part(count_products(jaxpr), total(whole), divided, total(rows), total(weights), total(experts))
