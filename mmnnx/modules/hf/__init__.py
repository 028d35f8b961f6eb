"""Published checkpoints: `load` reads a folder of the Hugging Face hub into a model, `save` writes one.

What comes in: a folder with `config.json` and safetensors, as `hf download` makes it, and where the weights
go. What goes out: an `LM` of `mmnnx.modules`, each weight read by the devices that hold it.
What always holds: what is loaded and saved again is equal byte by byte, and `transformers` reads it.
Read first: `loading.py`, then `tensors.py` for the names and `configs.py` for the sizes. The extra `hf` has
what it needs: `pip install "mmnnx[hf]"`.
"""

try:
    from mmnnx.modules.hf.configs import read_config, write_config
    from mmnnx.modules.hf.loading import abstract, load
    from mmnnx.modules.hf.saving import save, save_adapter
except ModuleNotFoundError as error:
    raise ImportError(f'mmnnx.modules.hf needs more packages: pip install "mmnnx[hf]" ({error})') from error

__all__ = ["abstract", "load", "read_config", "save", "save_adapter", "write_config"]
