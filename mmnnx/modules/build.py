"""The language model that a config is of."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mmnnx.modules.gemma import Gemma, GemmaConfig
from mmnnx.modules.gpt2 import GPT2, GPT2Config
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.modules.moe_lm import MoELM, MoELMConfig

KINDS: dict[type[LMConfig], type[LM]] = {
    LMConfig: LM,
    MoELMConfig: MoELM,
    GemmaConfig: Gemma,
    GPT2Config: GPT2,
}


def build(config: LMConfig, seed: int = 0) -> LM:
    """A model with new weights; under `nnx.eval_shape` an abstract one.

    Example:
      >>> type(build(GemmaConfig(layers=2))).__name__
      'Gemma'
    """
    rngs: Any = nnx.Rngs()
    rngs.default = _Stream(seed, tag="default")
    return KINDS[type(config)](config, rngs=rngs)


class _Stream(nnx.RngStream):
    """The same keys, with a counter that is set as a whole.

    `nnx.RngStream` sets the entry of it, and Flax compares shardings for that. A tracer has none, and JAX
    looks for the reason in all that was traced before: with hundreds of layers that takes a minute.
    """

    def __call__(self) -> jax.Array:
        count = self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(self.key.get_value(), count)
