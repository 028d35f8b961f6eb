"""The model, the optimizer and the train step of a run."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import mmnnx as mm
from mmnnx.inspect.schedules import by_name
from mmnnx.modules import LM, LMConfig, lora
from mmnnx.modules.build import build
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.jit.jit import Jit
from mmnnx.plan.language_models import rules_of, schedule_meshes
from mmnnx.sharding.pipeline import pipeline_sharding
from mmnnx.train.config import Schedule, TrainConfig
from mmnnx.train.errors import UserError
from mmnnx.train.optimizers import make_optimizer, trained
from mmnnx.train.rows import Row


def place(config: TrainConfig, devices: np.ndarray) -> tuple[mm.MultiMesh, mm.TaskSharding]:
    """The mesh of ``config.devices`` devices, and where on it each weight of the model lives.

    Each stage has consecutive blocks, their parameters balanced over stages. The first also has the
    embedding, the last the output layer. Inside a stage, axes are split over its devices as the options say.

    Raises:
      UserError: for a schedule that does not go with so many stages and microbatches, and for attention that
        these devices do not have.
    """
    sizes = model_config(config)
    if config.attention == "cudnn" and (platform := devices.flat[0].platform) != "gpu":
        raise UserError(
            f"--attention cudnn is for GPUs, and the devices of this run are {platform}: leave it out"
        )
    if config.attention == "cudnn" and config.precision == "float32":
        raise UserError("--attention cudnn computes in bfloat16: add --precision bfloat16, or leave it out")
    names, shape = zip(*config.mesh_axes.items())
    mesh = mm.MultiMesh(axis_sizes=shape, axis_names=names, devices=devices.reshape(shape))
    rules = rules_of(sizes, config.mesh_axes, config.fsdp)
    stages = [
        mm.Task(f"stage{n}", mesh_slice={"stage": at}, logical_axes=rules)
        for n, at in enumerate(stage_meshes(config, sizes))
    ]
    return mesh, pipeline_sharding(nnx.eval_shape(lambda: build(sizes)), stages)


def with_schedule(config: TrainConfig) -> TrainConfig:
    """The config with the schedule that "auto" stands for.

    That is the one with the lowest step latency in simulation with unit costs, of those for so many stages,
    virtual stages and microbatches; of equal ones, that with the fewest saved activations. There always is
    one: 1f1b, and looped-bfs for virtual stages.
    """
    if config.schedule != "auto":
        return config
    found = []
    for name in get_args(Schedule)[1:]:
        try:
            one = by_name(name, config.stages, config.microbatches, config.virtual_stages, UNIT_COSTS)
        except ValueError:
            continue  # not for so many
        if one.stages_per_mesh == config.virtual_stages:
            found.append((round(one.timeline.makespan, 6), max(one.memory), name))
    *_, name = min(found, key=lambda one: one[:2])
    return dataclasses.replace(config, schedule=name)


def stage_meshes(config: TrainConfig, sizes: LMConfig) -> tuple[int, ...]:
    """For each stage of the model, in order, the number of the mesh that it is on.

    Raises:
      UserError: for options that do not go together.
    """
    try:
        options = (config.schedule, config.stages, config.microbatches, config.virtual_stages)
        meshes = schedule_meshes(*options)
    except ValueError as error:
        raise UserError(
            f"--schedule {config.schedule} with --stages {config.stages}, --microbatches "
            f"{config.microbatches} and --virtual-stages {config.virtual_stages}: {error}"
        ) from error
    on_each = len(meshes) // config.stages
    if on_each != config.virtual_stages and config.virtual_stages > 1:
        raise UserError(f"--schedule {config.schedule} has --virtual-stages {on_each} alone")
    if len(meshes) > sizes.layers:
        raise UserError(
            f"{config.schedule} over --stages {config.stages} has {len(meshes)} stages, more than the "
            f"{sizes.layers} blocks of the model"
        )
    return meshes


def model_config(config: TrainConfig) -> LMConfig:
    """The sizes of the model that is trained.

    Raises:
      UserError: for a published model that is not known, or does not go on the devices.
    """
    dtype = jnp.dtype(config.precision)
    usual = "ring" if config.context > 1 else None
    attention: Any = usual if config.attention == "auto" else config.attention
    if config.model is None:
        return LMConfig(
            vocab=256,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            mlp=config.mlp,
            tied=config.tied,
            scan=config.scan,
            remat=config.remat,
            attention=attention,
            dtype=dtype,
        )
    changes: dict[str, Any] = dict(
        scan=config.scan, remat=config.remat, attention=attention, dtype=dtype, param_dtype=jnp.float32
    )
    try:
        found = published().read_config(config.model, **changes)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {config.model}: {error}") from error
    where = f"of {config.model}"
    if attention == "cudnn" and getattr(found, "attention_softcap", None) is not None:
        raise UserError(
            f"--attention cudnn knows no bounded scores, as those {where} are: auto or flash would do"
        )
    if config.stages > found.layers:
        raise UserError(f"--stages {config.stages} is more than the {found.layers} blocks {where}")
    for name in ("vocab", "heads", "kv_heads", "mlp"):
        if (size := getattr(found, name)) % config.tensor:
            raise UserError(f"--tensor {config.tensor} does not divide the {name} {where}, {size}")
    experts = getattr(found, "experts", 1)
    if experts % config.expert:
        text = f"the {experts} experts" if experts > 1 else "a model without experts"
        raise UserError(f"--expert {config.expert} does not divide {text} {where}")
    longest = getattr(found, "positions", config.sequence)
    if config.sequence > longest:
        raise UserError(f"--sequence {config.sequence} is more than the {longest} positions {where}")
    return found


def published() -> Any:
    """`mmnnx.modules.hf`.

    Raises:
      UserError: if what it needs is not installed.
    """
    try:
        from mmnnx.modules import hf
    except ImportError as error:
        raise UserError(f"--model: {error}") from error
    return hf


def create(config: TrainConfig, placement: mm.TaskSharding) -> tuple[LM, nnx.Optimizer]:
    """A model and its optimizer, each array made or read on its devices. Call it inside the mesh.

    Raises:
      UserError: for a published model whose weights cannot be read.
    """
    if config.model is None:
        model = mm.jit(lambda: build(model_config(config), config.seed), out_shardings=placement)()
    else:
        types = dict(dtype=config.precision, param_dtype=jnp.float32)
        kinds = dict(scan=config.scan, remat=config.remat, attention=model_config(config).attention)
        try:
            model = published().load(config.model, placement=placement, **types, **kinds)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {config.model}: {error}") from error
    if config.lora:
        lora(model, config.lora, seed=config.seed)
    return model, mm.jit(lambda model: make_optimizer(config, model))(model)


def make_abstract(config: TrainConfig) -> tuple[LM, nnx.Optimizer]:
    """The same as abstract nodes, to be restored."""
    model = nnx.eval_shape(lambda: make_model(config))
    return model, nnx.eval_shape(lambda: make_optimizer(config, make_model(config)))


def make_model(config: TrainConfig) -> LM:
    model = build(model_config(config), config.seed)
    if config.lora:
        lora(model, config.lora)
    return model


def loss_fn(model: LM, batch: Row) -> jax.Array:
    return model.loss(**batch)


def make_train_step(config: TrainConfig) -> Jit:
    """``train_step(model, optimizer, batch) -> {"loss", "grad_norm"}``, the sum over microbatches.

    With weights that sum to one over the batch it is the mean over its labels, however these are divided.
    Model and optimizer are updated in place: their state is donated.
    """
    rules = rules_of(model_config(config), config.mesh_axes, config.fsdp)
    examples = rules["batch"], rules["sequence"]
    grad_fn = mm.microbatch(
        nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, trained(config))),
        dim=0,
        size=config.batch // config.microbatches,
        argnum=1,
        schedule=config.schedule,
        arg_shardings=PartitionSpec(*examples) if any(examples) else None,
        reduce="sum",
    )

    def train_step(model: LM, optimizer: nnx.Optimizer, batch: Row) -> dict[str, jax.Array]:
        loss, grads = grad_fn(model, batch)
        grad_norm = optax.tree.norm(grads)
        optimizer.update(model, grads)
        return {"loss": loss, "grad_norm": grad_norm}

    return mm.jit(train_step, donate_argnums=(0, 1))
