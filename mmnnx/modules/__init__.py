"""Flax NNX modules and models, their weights annotated with logical axis names.

What comes in: sizes, as arguments or in a config, and `nnx.Rngs`. What goes out: plain NNX modules to use, to
subclass or to copy from.
What always holds: they know nothing of pipelines; outside of `mm.jit` and tasks their annotations do nothing.
Read first: `lm.py`, then `linear.py` and `logical.py` for the axis names, `stack.py` for scanned layers.
"""

from flax.nnx import Dropout

from mmnnx.modules.attention import Attention
from mmnnx.modules.conv import ConvBlock, ResidualBlock
from mmnnx.modules.cross_entropy import mean_cross_entropy
from mmnnx.modules.embed import Embed
from mmnnx.modules.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from mmnnx.modules.gemma import Gemma, GemmaConfig
from mmnnx.modules.generate import generate
from mmnnx.modules.gpt2 import GPT2, GPT2Config
from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.linear import Linear, LinearGeneral
from mmnnx.modules.lm import LM, Block, LMConfig
from mmnnx.modules.logical import constrain, named
from mmnnx.modules.lora import LoRALinear, lora
from mmnnx.modules.mlp import MLP, SwiGLU
from mmnnx.modules.moe import MoE, MoEAux
from mmnnx.modules.moe_lm import MoELM, MoELMConfig
from mmnnx.modules.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from mmnnx.modules.presets import PRESETS
from mmnnx.modules.rotary import LinearScaling, RotaryScaling, YarnScaling, rotary, rotary_frequencies
from mmnnx.modules.sampling import filter_logits
from mmnnx.modules.stack import Segment, Stack, apply_layers
from mmnnx.modules.two_tower import TextConfig, TwoTower, TwoTowerConfig, contrastive_loss
from mmnnx.modules.vit import ImageEncoder, ViT, ViTConfig

__all__ = [
    "GPT2",
    "LM",
    "MLP",
    "PRESETS",
    "Attention",
    "Block",
    "ConvBlock",
    "Dropout",
    "Embed",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "GPT2Config",
    "Gemma",
    "GemmaConfig",
    "ImageEncoder",
    "KVCache",
    "LMConfig",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "LinearScaling",
    "LoRALinear",
    "MoE",
    "MoEAux",
    "MoELM",
    "MoELMConfig",
    "OffsetRMSNorm",
    "RMSNorm",
    "ResidualBlock",
    "RotaryScaling",
    "Segment",
    "Stack",
    "SwiGLU",
    "TextConfig",
    "TwoTower",
    "TwoTowerConfig",
    "ViT",
    "ViTConfig",
    "YarnScaling",
    "apply_layers",
    "constrain",
    "contrastive_loss",
    "filter_logits",
    "generate",
    "lora",
    "mean_cross_entropy",
    "named",
    "rotary",
    "rotary_frequencies",
]
