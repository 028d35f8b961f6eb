"""The main job: a language model trained on real text, as a pipeline."""

from mmnnx.train.config import TrainConfig
from mmnnx.train.loop import train

__all__ = ["TrainConfig", "train"]
