"""The model, the optimizer, the train step and the validation of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mmnnx as mm
from mmnnx.modules import GPT2, LM, Gemma, GemmaConfig, GPT2Config, LMConfig, MoELM, MoELMConfig
from mmnnx.mpmd.jit.jit import Jit
from mmnnx.sharding.pipeline import pipeline_sharding
from mmnnx.sharding.rules import logical_rules
from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import UserError


def place(config: TrainConfig, devices: np.ndarray) -> tuple[mm.MultiMesh, mm.TaskSharding]:
    """The mesh of ``config.stages * config.tensor`` devices, and where on it each weight of the model lives.

    Each stage has consecutive blocks, their parameters balanced over stages. The first also has the
    embedding, the last the output layer. Inside a stage the axes of tensor parallelism are split over its
    devices.
    """
    mesh = mm.MultiMesh(
        axis_sizes=(config.stages, config.tensor),
        axis_names=("stage", "model"),
        devices=devices.reshape(config.stages, config.tensor),
    )
    model = nnx.eval_shape(lambda: make_model(config))
    return mesh, pipeline_sharding(model, config.stages, rules=logical_rules("tensor"))


def model_config(config: TrainConfig) -> LMConfig:
    """The sizes of the model that is trained.

    Raises:
      UserError: for a published model that is not known, or does not go on the devices.
    """
    dtype = jnp.dtype(config.precision)
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
            dtype=dtype,
        )
    try:
        found = published().read_config(config.model, scan=config.scan, dtype=dtype, param_dtype=jnp.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {config.model}: {error}") from error
    where = f"of {config.model}"
    if config.stages > found.layers:
        raise UserError(f"--stages {config.stages} is more than the {found.layers} blocks {where}")
    for name in ("vocab", "heads", "kv_heads", "mlp"):
        if (size := getattr(found, name)) % config.tensor:
            raise UserError(f"--tensor {config.tensor} does not divide the {name} {where}, {size}")
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
        raise UserError(f'--model needs more packages: pip install "mmnnx[hf]" ({error})') from error
    return hf


def create(config: TrainConfig, placement: mm.TaskSharding) -> tuple[LM, nnx.Optimizer]:
    """A model and its optimizer, each array made or read on its devices. Call it inside the mesh.

    Raises:
      UserError: for a published model whose weights cannot be read.
    """
    if config.model is None:
        model = mm.jit(lambda: make_model(config), out_shardings=placement)()
    else:
        types = dict(dtype=config.precision, param_dtype=jnp.float32)
        try:
            model = published().load(config.model, placement=placement, scan=config.scan, **types)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {config.model}: {error}") from error
    return model, mm.jit(lambda model: make_optimizer(config, model))(model)


def make_abstract(config: TrainConfig) -> tuple[LM, nnx.Optimizer]:
    """The same as abstract nodes, to be restored."""
    model = nnx.eval_shape(lambda: make_model(config))
    return model, nnx.eval_shape(lambda: make_optimizer(config, make_model(config)))


def make_model(config: TrainConfig) -> LM:
    sizes = model_config(config)
    kinds: dict[type[LMConfig], type[LM]] = {MoELMConfig: MoELM, GemmaConfig: Gemma, GPT2Config: GPT2}
    return kinds.get(type(sizes), LM)(sizes, rngs=nnx.Rngs(config.seed))


def make_optimizer(config: TrainConfig, model: LM) -> nnx.Optimizer:
    return nnx.Optimizer(model, optimizer(config), wrt=nnx.Param)


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW on clipped gradients, with linear warm-up and cosine decay of the learning rate."""
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.learning_rate / 10,
    )

    def is_matrix(path, param):
        in_stack = config.scan and jax.tree_util.keystr(path[:1], simple=True) == "blocks"
        return param.ndim > (2 if in_stack else 1)

    def matrices(params):
        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(learning_rate, b2=0.98, weight_decay=config.weight_decay, mask=matrices),
    )


def loss_fn(model: LM, tokens: jax.Array) -> jax.Array:
    return model.loss(tokens)


def make_train_step(config: TrainConfig) -> Jit:
    """``train_step(model, optimizer, tokens) -> loss``: one update in place, by the mean over microbatches.

    The state of model and optimizer is donated.
    """
    grad_fn = mm.microbatch(
        nnx.value_and_grad(loss_fn),
        dim=0,
        size=config.batch // config.microbatches,
        argnum=1,
        schedule=config.schedule,
        reduce="mean",
    )

    def train_step(model: LM, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, grads = grad_fn(model, tokens)
        optimizer.update(model, grads)
        return loss

    return mm.jit(train_step, donate_argnums=(0, 1))


def make_validate(held_out: np.ndarray) -> Callable[[LM], float]:
    """``validate(model)``: mean loss in nats per token over ``held_out`` [count, batch, length + 1]."""
    eval_step = mm.jit(loss_fn)

    def validate(model: LM) -> float:
        losses = [eval_step(model, batch) for batch in held_out]
        return float(np.mean(mm.fetch(losses)))

    return validate
