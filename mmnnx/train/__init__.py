"""The main job, ``mmnnx train``: a language model trained on text, as a pipeline.

What comes in: a TrainConfig, from the command line, and text.
What goes out: a run folder with metrics, checkpoints, pictures and a sample of text.
What always holds: processes take the same steps and stop after the same one; a run can be resumed from its
latest checkpoint, on other stages and processes too; what the user can mend is one line, not a traceback.
Read first: `loop.py`, then `step.py` (model, train step, validation) and `lockstep.py` (several processes).
"""

from mmnnx.train.config import TrainConfig
from mmnnx.train.loop import train

__all__ = ["TrainConfig", "train"]
