"""The optimizer of a run, its learning rate, and which parameters it trains."""

from __future__ import annotations

import jax
import optax
from flax import nnx

from mmnnx.modules import LM
from mmnnx.train.average import average_weights
from mmnnx.train.config import TrainConfig


def make_optimizer(config: TrainConfig, model: LM) -> nnx.Optimizer:
    return nnx.Optimizer(model, optimizer(config), wrt=trained(config))


def trained(config: TrainConfig) -> type[nnx.Param]:
    """Which parameters are trained."""
    return nnx.LoRAParam if config.lora else nnx.Param


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up, and a cosine to a tenth."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.peak_rate / (config.warmup + 1),
        peak_value=config.peak_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.peak_rate / 10,
    )


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer's rule on clipped gradients, and the average of the weights; matrices alone decay."""

    def is_matrix(path, param):
        in_stack = config.scan and jax.tree_util.keystr(path[:1], simple=True) == "blocks"
        return param.ndim > (2 if in_stack else 1)

    def matrices(params):
        return jax.tree_util.tree_map_with_path(is_matrix, params)

    def dimensions(params):
        """Muon's matrices: the last two dimensions of those in blocks; embedding and head are Adam's."""

        def of(path, param):
            in_block = jax.tree_util.keystr(path[:1], simple=True) == "blocks"
            if not (in_block and is_matrix(path, param)):
                return None
            return optax.contrib.MuonDimensionNumbers(param.ndim - 2, param.ndim - 1)

        return jax.tree_util.tree_map_with_path(of, params)

    rate, decay = learning_rate(config), config.weight_decay
    if config.optimizer == "adamw":
        rule = optax.adamw(rate, b2=0.98, weight_decay=decay, mask=matrices)
    elif config.optimizer == "lion":
        rule = optax.lion(rate, weight_decay=decay, mask=matrices)
    elif config.optimizer == "muon":
        options = dict(weight_decay_mask=matrices, muon_weight_dimension_numbers=dimensions)
        rule = optax.contrib.muon(rate, weight_decay=decay, adam_weight_decay=decay, **options)
    else:
        by_rate = lambda step: decay * rate(step)  # which its own decay is not multiplied by
        rule = optax.adafactor(rate, weight_decay_rate=by_rate, weight_decay_mask=matrices)
    average = [average_weights(config.ema)] if config.ema else []
    return optax.chain(optax.clip_by_global_norm(config.clip), rule, *average)
