"""The language model that a config is of."""

from __future__ import annotations

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
    return KINDS[type(config)](config, rngs=nnx.Rngs(seed))
