"""The train step of a published language model over stages and the axes of each: what is planned."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from mmnnx.inspect.schedules import by_name
from mmnnx.modules import LM, LMConfig, lora
from mmnnx.modules.build import build
from mmnnx.modules.moe_lm import MoELMConfig
from mmnnx.mpmd.frontend.microbatch import microbatch
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.jit.jit import Jit, jit
from mmnnx.plan.planning import Plan, make_plan
from mmnnx.plan.targets import TPUS, target
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.pipeline import pipeline_sharding
from mmnnx.sharding.rules import LogicalRules, logical_rules
from mmnnx.sharding.task import Task

# Hidden features on a device, from which on an expert is wide: a tile of `mmnnx.modules.grouped_matmul`.
WIDE_EXPERT = 1024


@functools.lru_cache(maxsize=4096)
def schedule_meshes(schedule: str, stages: int, microbatches: int, interleave: int) -> tuple[int, ...]:
    """For each stage of a schedule, in the order of the model, the number of its mesh."""
    return by_name(schedule, stages, microbatches, interleave, UNIT_COSTS).stages.meshes


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A language model, trained over a machine.

    Args:
      model: a preset of `LMConfig` or `MoELMConfig`.
      target: the machine, as `mm.target` names it.
      stages, data, context, expert, tensor: pipeline stages, and devices along the axes of each (see
        `rules_of`).
      batch: sequences in a step.
      sequence: tokens in a sequence.
      rows: sequences in a microbatch for each of the devices that sequences are divided over.
      schedule: of `mm.microbatch`.
      interleave: stages on each mesh, for schedules that have several.
      remat: the backward computes each block again.
      fsdp: weights and optimizer state are divided over "data", too (ZeRO, arXiv:1910.02054).
      moments: the dtype of Adam's first moment.
      layers: blocks, in place of the preset's.
      loss_chunks, attention_chunks: parts of the sequence whose logits (scores) are made one after the other.
      attention: how it is computed (see `Attention`). Default: "ring" where sequences are divided.
      scan: blocks are stacked and scanned, which compiles one for all; the stack is divided between stages.

    Raises:
      ValueError: for sizes that do not fit each other; names both.
    """

    model: str
    target: str
    stages: int = 4
    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    batch: int = 32
    sequence: int = 4096
    rows: int = 1
    schedule: str = "1f1b"
    interleave: int = 2
    remat: bool = False
    fsdp: bool = False
    moments: Literal["float32", "bfloat16"] = "float32"
    layers: int | None = None
    loss_chunks: int = 1
    attention_chunks: int = 1
    attention: Literal["xla", "cudnn", "flash", "ring"] | None = None
    scan: bool = False

    def __post_init__(self) -> None:
        sizes = ("stages", "data", "context", "expert", "tensor", "batch", "sequence", "rows", "interleave")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.attention == "cudnn" and (chip := self.target.partition(":")[0]) in TPUS:
            raise ValueError(f"attention 'cudnn' is for GPUs, and {chip} is a TPU: leave it out")
        if self.attention == "cudnn" and self.context > 1:
            raise ValueError(
                f"attention 'cudnn' takes whole sequences, which {self.context} along context divide: "
                "leave one out"
            )
        if self.batch % self.microbatch:
            along = f" x {self.expert} along expert" if self.expert > 1 else ""
            fewer = self.batch - self.batch % self.microbatch
            fitting = [str(size) for size in (fewer, fewer + self.microbatch) if size]
            raise ValueError(
                f"a batch of {self.batch} sequences is not divisible into microbatches of {self.microbatch} "
                f"({self.rows} rows x {self.data} along data{along}): {' or '.join(fitting)} would be"
            )
        if self.sequence % self.context:
            raise ValueError(
                f"a sequence of {self.sequence} tokens is not divisible over {self.context} along context"
            )
        experts = getattr(self.config, "experts", 1)
        if experts % self.expert:
            known = f"has {experts} experts, not divisible" if experts > 1 else "has no experts to divide"
            raise ValueError(f"{self.model} {known} over {self.expert} along expert")
        if self.config.layers < len(self.meshes):
            raise ValueError(
                f"{self.model} has {self.config.layers} blocks, too few for {len(self.meshes)} stages"
            )

    @property
    def meshes(self) -> tuple[int, ...]:
        """For each stage, in the order of the model, the number of its mesh."""
        few = min(self.microbatches, 2 * self.stages + 2)  # where stages live does not depend on how many
        return schedule_meshes(self.schedule, self.stages, few, self.interleave)

    @property
    def config(self) -> LMConfig:
        """The sizes of the model."""
        kind = MoELMConfig if self.model in MoELMConfig.presets else LMConfig
        if self.model not in kind.presets:
            known = ", ".join(map(repr, (*LMConfig.presets, *MoELMConfig.presets)))
            raise ValueError(f"there is no model {self.model!r}: there are {known}")
        changes: dict[str, Any] = {} if self.layers is None else {"layers": self.layers}
        changes |= dict(remat=self.remat)
        changes |= dict(loss_chunks=self.loss_chunks, attention_chunks=self.attention_chunks)
        changes |= dict(attention=self.attention or ("ring" if self.context > 1 else None))
        return kind.preset(self.model, scan=self.scan, **changes)

    @property
    def microbatch(self) -> int:
        """Sequences in a microbatch."""
        return self.rows * self.data * self.expert

    @property
    def microbatches(self) -> int:
        return self.batch // self.microbatch

    @property
    def axes(self) -> dict[str, int]:
        """The axes of its mesh, with their sizes."""
        return mesh_axes(self.stages, self.data, self.context, self.expert, self.tensor)

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.sequence

    def rules(self) -> LogicalRules:
        """Where the axes of weights and activations go inside a stage (see `rules_of`)."""
        return rules_of(self.config, self.axes, self.fsdp)

    def devices(self) -> list[jax.Device]:
        """The devices of its machine."""
        return target(self.target)

    def mesh(self, devices: list[jax.Device] | None = None) -> MultiMesh:
        """The machine's devices along its axes.

        Raises:
          ValueError: if there are more or fewer.
        """
        found = self.devices() if devices is None else devices
        names, sizes = zip(*self.axes.items())
        if math.prod(sizes) != len(found):
            options = {"stage": "stages", "model": "tensor"}
            raise ValueError(
                f"{self.target} has {len(found)} devices, and "
                f"{' x '.join(options.get(name, name) for name in names)} = "
                f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}"
            )
        devices_array = np.array(found, dtype=object).reshape(sizes)
        return MultiMesh(devices=devices_array, axis_sizes=sizes, axis_names=names)

    def make(self) -> tuple[LM, nnx.Optimizer]:
        """The model and AdamW, on one device or abstract."""
        model = build(self.config)
        rule = optax.adamw(3e-4, mu_dtype=jnp.dtype(self.moments))
        return model, nnx.Optimizer(model, rule, wrt=nnx.Param)

    def train_step(self, model: LM) -> Jit[..., jax.Array]:
        """`train_step(model, optimizer, tokens) -> loss`, for model and optimizer on this mesh."""
        rules = self.rules()
        stages = [
            Task(f"stage{n}", mesh_slice={"stage": mesh}, logical_axes=rules)
            for n, mesh in enumerate(self.meshes)
        ]
        sharding = pipeline_sharding(model, stages)
        examples = rules["batch"], rules["sequence"]
        grad_fn = microbatch(
            nnx.value_and_grad(lambda model, batch: model.loss(**batch)),
            dim=0,
            size=self.microbatch,
            argnum=1,
            schedule=self.schedule,
            arg_shardings=PartitionSpec(*examples) if any(examples) else None,
            reduce="mean",
        )

        def train_step(model: LM, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
            loss, grads = grad_fn(model, dict(tokens=tokens[:, :-1], labels=tokens[:, 1:]))
            optimizer.update(model, grads)
            return loss

        return jit(train_step, in_shardings=(sharding, sharding, None), donate_argnums=(0, 1))

    def plan(self) -> Plan:
        """Compiles the step for its machine. See `mm.plan`."""
        with self.mesh():
            model, optimizer = nnx.eval_shape(self.make)
            tokens = jax.ShapeDtypeStruct((self.batch, self.sequence + 1), jnp.int32)
            return make_plan(self.train_step(model), model, optimizer, tokens)

    def model_flops(self) -> float:
        """Operations of a step that the model needs, without recomputation (see `flops_of_token`)."""
        return self.tokens * flops_of_token(self.config, self.sequence)


def mesh_axes(stages: int, data: int, context: int, expert: int, tensor: int) -> dict[str, int]:
    """The axes of a mesh, with their sizes: "stage", "data", "context", "expert" and "model".

    "context" and "expert" are there if they have more than one device.
    """
    optional = {"context": context, "expert": expert}
    shown = {axis: size for axis, size in optional.items() if size > 1}
    return {"stage": stages, "data": data, **shown, "model": tensor}


def rules_of(config: LMConfig, axes: Mapping[str, int], fsdp: bool) -> LogicalRules:
    """Where the axes of weights and activations go inside a stage.

    Args:
      config: the model.
      axes: sizes of the axes "data", "model" and, if they are there, "context" and "expert". Experts go along
        "expert", else along "model". If they are wide and have no capacity, or if "model" does not divide
        their number, their hidden features go along "model" instead. Sequences go along "context", the batch
        along "data" and "expert".
      fsdp: whether weights are divided over "data".
    """
    many = {axis for axis, size in axes.items() if size > 1}
    experts = next((axis for axis in ("expert", "model") if axis in many), None)
    if isinstance(config, MoELMConfig) and experts == "model":
        # Devices with some features of all experts have equal work, whatever tokens choose.
        wide = config.capacity_factor is None and config.mlp >= WIDE_EXPERT * axes["model"]
        experts = None if wide or config.experts % axes["model"] else experts
    rules: dict[str, Any] = {
        "batch": tuple(axis for axis in ("data", "expert") if axis in many) or None,
        "sequence": "context" if "context" in many else None,
    }
    if isinstance(config, MoELMConfig):
        rules["expert"] = experts
    presets = (*(["tensor"] if "model" in many else []), *(["fsdp"] if fsdp else []))
    return logical_rules(*presets, **rules)


def flops_of_token(config: LMConfig, sequence: int, rank: int = 0) -> float:
    """Operations of forward and backward for a token, without recomputation (arXiv:2204.02311).

    6 for each weight that it meets, and 12 x width of the heads for each token that it sees in a layer, of
    which there are half a sequence on average, fewer with a window. With `rank`, that of LoRA's additions,
    they alone are trained: 4 for each other weight, which has no gradient.
    """
    heads = config.heads * (config.head_dim or config.width // config.heads)
    sizes = [sequence if w is None else min(w, sequence) for w in config.windows]
    seen = sum(size - size**2 / (2 * sequence) for size in sizes)  # the first tokens see less than a window
    weights = 6 * active_parameters(config)
    if rank:
        added = nnx.state(lora(nnx.eval_shape(lambda: build(config)), rank), nnx.LoRAParam)
        weights = 4 * active_parameters(config) + 6 * sum(leaf.size for leaf in jax.tree.leaves(added))
    return weights + 12 * heads * seen


def active_parameters(config: LMConfig) -> int:
    """The weights that a token meets in matrix products: no embedding, of experts the chosen ones."""
    total = 0
    for path, variable in nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: build(config)), nnx.Param)):
        size = math.prod(variable.get_raw_value().shape)
        if path[0] in ("embed", "positions") and not (config.tied and path[0] == "embed"):
            continue
        if isinstance(config, MoELMConfig) and is_of_experts(variable, config):
            size = size * config.top_k // config.experts
        total += size
    return total


def is_of_experts(variable: nnx.Variable, config: LMConfig) -> bool:
    """Whether a weight holds one matrix for each expert."""
    if not isinstance(config, MoELMConfig):
        return False
    shape = variable.get_raw_value().shape
    return len(shape) - bool(config.scan) == 3 and shape[-3] == config.experts
