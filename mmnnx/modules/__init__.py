"""Flax NNX models, their weights annotated with logical axis names."""

from mmnnx.modules.lm import LM, LMConfig

__all__ = ["LM", "LMConfig"]
