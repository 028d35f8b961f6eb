"""All options of a run in one dataclass; its comments are the text of ``mmnnx train --help``."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from mmnnx.options import optional
from mmnnx.plan.language_models import mesh_axes
from mmnnx.train.assistant import LossOn
from mmnnx.train.checkpoint.errors import CheckpointError
from mmnnx.train.checkpoint.paths import folder_at, in_bucket
from mmnnx.train.errors import UserError, above_zero
from mmnnx.train.rows import Packing

PATHS = ("config", "data", "model", "out")
DEVICES = "--stages x --data-parallel x --context x --expert x --tensor"
FAR = 300  # how much larger or smaller a value may be that is proposed in place of one that does not fit
POSITIVE = (
    *("steps", "eval_every", "keep", "batch", "sequence", "stages", "tensor", "data_parallel", "context"),
    *("expert", "virtual_stages", "processes", "microbatches", "layers", "width", "heads", "kv_heads", "mlp"),
    "clip",
)
SIZES = ("layers", "width", "heads", "kv_heads", "mlp", "tied")

Precision = Literal["float32", "bfloat16"]
Schedule = Literal[
    "auto",
    "1f1b",
    "gpipe",
    "eager-1f1b",
    "wavefront",
    "zero-bubble-h1",
    "zero-bubble-h2",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zero-bubble",
    "zbv",
    "dualpipe-v",
]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a language model of bytes, or fine-tune a published one, pipelined over stages of devices.

    Example:
      >>> TrainConfig(stages=2, tensor=2).stages
      2
    """

    # --- the run

    config: Annotated[Path | None, optional("PATH", "none")] = None
    """A TOML file with some of these options, by their names; those of the command line go before."""
    name: str = "lm"
    """Name of the run: it is kept in runs/NAME."""
    out: Annotated[Path | None, optional("PATH", "runs/NAME")] = None
    """Folder to keep the run in."""
    checkpoints: Annotated[str | None, optional("URL", "in the run's folder")] = None
    """Keep the checkpoints in a bucket: the URL of a folder in it, gs://BUCKET/FOLDER."""
    resume: bool = False
    """Go on with the run in --out, or in runs/NAME, from its latest checkpoint.
    Options that are left out are as they were."""
    steps: int = 200
    """Number of optimizer steps, counted from the start of the run."""
    seed: int = 0
    """Seed of the initial weights, of the order of the data and of the text sampled at the end."""
    eval_every: int = 50
    """Steps between two validations, each of which saves a checkpoint too."""
    keep: int = 2
    """Latest checkpoints to keep, besides the one with the best validation."""
    sample: int = 200
    """Bytes (tokens, with a model) of text to generate at the end; 0 for none."""
    profile: int = 0
    """Steps to trace by jax.profiler, after the first two, which compile; 0 for none.
    At the end each part of a step is measured, too (one process, several stages).
    Both are kept in the run's folder, in profile/."""

    tensorboard: bool = False
    """Write what is measured for TensorBoard as well, in the run's folder, in tensorboard/."""
    wandb: Annotated[str | None, optional("PROJECT", "none")] = None
    """Project of Weights & Biases to send what is measured to; a resumed run goes on in the same place."""

    # --- the data

    data: Annotated[Path | None, optional("PATH", "the source text of Python's standard library")] = None
    """A file or a folder of UTF-8 text, JSON Lines (.jsonl) or Parquet (.parquet).
    Records have a "text", or "messages" for the model's chat template."""
    packing: Packing = "auto"
    """How documents become sequences.
    "documents": whole ones side by side, of which none sees another, and padding; longer ones are cut.
    "stream": joined and cut, so that a token sees the documents before its own.
    "auto": documents for records, a stream for text files alone."""
    loss_on: LossOn = "all"
    """Which tokens of "messages" are trained on, and counted in validations.
    "assistant": those that the assistant writes, with the token that ends its turn.
    Records with a "text" count in full."""
    batch: int = 16
    """Sequences in a step."""
    sequence: int = 128
    """Bytes (tokens, with a model) in a sequence."""

    # --- the devices

    stages: int = 4
    """Pipeline stages the layers are split over."""
    tensor: int = 2
    """Devices over which the weights of a stage are split (tensor parallelism)."""
    data_parallel: int = 1
    """Groups of such devices in a stage, which share a microbatch's sequences (data parallelism)."""
    context: int = 1
    """Devices over which each sequence is split (context parallelism); see --attention."""
    expert: int = 1
    """Devices over which the experts of a --model are split (expert parallelism), and sequences, too.
    With 1, --tensor splits experts, or the hidden features of wide ones."""
    fsdp: bool = False
    """Divide weights and optimizer state among the groups of --data-parallel, too."""
    virtual_stages: int = 1
    """Stages on each mesh; above 1 for interleaved and V-shaped schedules."""
    processes: int = 1
    """Processes on this machine to run in, each with an equal share of the devices."""
    cluster: bool = False
    """This is one of the processes that Slurm, Open MPI or another launcher known to JAX has started."""
    microbatches: int = 8
    """Equal parts the batch is divided into, which go through the pipeline one after the other."""
    schedule: Schedule = "1f1b"
    """Order in which a stage runs forwards and backwards of microbatches; `mmnnx schedule` compares them.
    Auto takes the one with the shortest simulated step of those for so many stages and microbatches."""
    remat: bool = False
    """Keep only what is between blocks for the backward, which computes each block again."""
    attention: Literal["auto", "xla", "cudnn", "flash", "ring"] = "auto"
    """How attention is computed: "cudnn" is flash attention on GPUs, "flash" on TPUs; "xla" makes all scores.
    "ring": the devices of --context pass keys and values around. With "flash" each has all tokens of some
    heads instead, if these can be divided; others gather keys and values.
    "auto": ring with --context, else xla."""
    precision: Precision = "float32"
    """Type to compute in. Weights and optimizer state are float32 either way."""

    # --- the model

    model: Annotated[Path | None, optional("PATH", "none")] = None
    """A folder with a published model, as the Hugging Face hub has them: its sizes, weights, tokenizer.
    Without one, a new model of bytes is made, of the sizes below."""
    lora: int = 0
    """Rank of low-rank additions to the linear layers, which alone are trained; 0 trains all weights."""
    layers: int = 8
    """Transformer blocks."""
    width: int = 96
    """Features of a token between blocks."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """Key-value heads, each shared by heads / kv_heads attention heads."""
    mlp: int = 256
    """Features inside a block's feed-forward layer."""
    tied: bool = False
    """Use the embedding as the output layer too."""
    scan: bool = False
    """Stack the blocks, one Variable for each weight, divided between the stages, and scan them.
    A deep model compiles in the time of one block."""

    # --- the optimizer

    optimizer: Literal["adamw", "lion", "muon", "adafactor"] = "adamw"
    """How weights follow from gradients. What --learning-rate suits one rarely suits another."""
    learning_rate: Annotated[
        float | None, optional("FLOAT", "4e-3; 2e-5 for a model from --model; 2e-4 with --lora")
    ] = None
    """Peak learning rate, reached after the warm-up; it then decays along a cosine to a tenth."""
    warmup: int = 20
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """Decay of the weight matrices (gains of norms do not decay)."""
    clip: float = 1.0
    """Largest global norm of the gradients; they are scaled down to it."""
    ema: float = 0.0
    """Decay of a moving average of the weights, such as 0.999; 0 for none.
    Validations, the sample, and `mmnnx eval`, `generate` and `export` use the averages.
    They take as much memory as what is trained."""

    def folder(self) -> Path:
        """Where the run is kept."""
        return self.out or Path("runs") / self.name

    @property
    def peak_rate(self) -> float:
        """The learning rate after the warm-up."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 2e-4 if self.lora else 4e-3 if self.model is None else 2e-5

    @property
    def devices(self) -> int:
        """How many devices it runs on."""
        return math.prod(self.mesh_axes.values())

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The axes of its mesh, with their sizes."""
        return mesh_axes(self.stages, self.data_parallel, self.context, self.expert, self.tensor)

    def validate(self) -> None:
        """Raise UserError for values that cannot work together, naming the options and what would do."""
        try:
            self._check()
        except _Misfit as misfit:
            raise UserError(f"{misfit}{nearest(self, misfit.options)}") from None

    def _check(self) -> None:
        for field, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{_option(field)} must be finite, not {value}")
        above_zero(**{field: getattr(self, field) for field in POSITIVE}, learning_rate=self.peak_rate)
        for field in ("warmup", "weight_decay", "seed", "sample", "profile", "lora"):
            if not getattr(self, field) >= 0:
                raise UserError(f"{_option(field)} must not be below zero, not {getattr(self, field)}")
        for field, value in vars(self).items():
            if isinstance(value, int) and field != "seed" and value >= 2**31:
                raise UserError(f"{_option(field)} must be below 2**31, not {value}")
        if not 0 <= self.ema < 1:
            raise UserError(f"--ema must be 0 or more and below 1, not {self.ema}")
        if self.profile > self.steps:
            raise UserError(f"--profile {self.profile} is more than the {self.steps} --steps there are")
        if self.seed >= 2**32:
            raise UserError(f"--seed must be below 2**32, not {self.seed}")
        if re.match(r"\w\w+:/", str(self.folder())):  # pathlib makes one slash of two
            raise UserError(
                f"--out {self.out}: a run is kept on a file system, local or shared; checkpoints alone may "
                "be in a bucket: --checkpoints gs://BUCKET/FOLDER"
            )
        if self.checkpoints is not None:
            self._check_bucket(self.checkpoints)
        if self.out is None and (not self.name or {"..", "/"} & {*Path(self.name).parts}):
            raise UserError(f"--name {self.name!r}: it is a folder in runs; --out is for others")
        try:
            where = os.path.abspath(self.folder())
        except FileNotFoundError:
            raise UserError("the working directory is gone: go to one that is there") from None
        if re.search(r"[*?[]", where):
            raise UserError(f"{where}: orbax would take *, ? and [ for a pattern; choose another --out")
        self._check_multiple("batch", "microbatches")
        self._check_multiple("sequence", "context")
        if self.attention == "cudnn" and self.context > 1:
            raise UserError(
                "--attention cudnn takes whole sequences, which "
                f"--context {self.context} divides: leave one out"
            )
        groups = {
            name: getattr(self, name) for name in ("data_parallel", "expert") if getattr(self, name) > 1
        }
        if (rows := self.batch // self.microbatches) % math.prod(groups.values()):
            given = " x ".join(f"{_option(name)} {size}" for name, size in groups.items())
            raise _Misfit(
                f"{given} does not divide the {rows} sequences of a microbatch "
                f"(--batch {self.batch} over --microbatches {self.microbatches})",
                *(*groups, "batch", "microbatches"),
            )
        if self.fsdp and self.data_parallel == 1:
            raise UserError("--fsdp divides weights among the groups of --data-parallel, and there is one")
        if self.model is None:
            if self.lora:
                raise UserError("--lora adds to the layers of a --model, and there is none")
            if self.loss_on == "assistant":
                raise UserError("--loss-on assistant needs the chat template of a --model, and there is none")
            if self.expert > 1:
                raise UserError("--expert divides the experts of a --model that has some, and there is none")
            self._check_sizes()
        else:
            usual = type(self).__dataclass_fields__
            changed = [name for name in SIZES if getattr(self, name) != usual[name].default]
            if changed:
                raise UserError(f"{_option(changed[0])} is for a new model: --model has sizes of its own")
        if self.cluster and self.processes > 1:
            raise UserError(
                f"--cluster joins processes that were started elsewhere, --processes {self.processes} starts "
                "some here: give one of them"
            )
        share_of_devices(self.devices, self.processes)

    def _check_bucket(self, url: str) -> None:
        try:
            folder = folder_at(url)
        except CheckpointError as error:
            raise UserError(f"--checkpoints {error}") from error
        if not in_bucket(folder):
            raise UserError(f"--checkpoints {url} is no URL, gs://BUCKET/FOLDER; for a folder give --out")

    def _check_sizes(self) -> None:
        """Raises _Misfit for sizes of a new model that do not fit each other or the devices."""
        for whole, part in (
            ("width", "heads"),
            ("heads", "kv_heads"),
            ("heads", "tensor"),
            ("kv_heads", "tensor"),
            ("mlp", "tensor"),
        ):
            self._check_multiple(whole, part)
        if self.width // self.heads % 2:
            raise _Misfit(
                f"--width {self.width} over --heads {self.heads} leaves {self.width // self.heads} features "
                "a head, and rotary positions need an even number",
                *("width", "heads"),
            )
        if 256 % self.tensor:
            text = f"--tensor {self.tensor} must divide the 256 byte values of the vocabulary"
            raise _Misfit(text, "tensor")
        if self.stages > self.layers:
            text = f"--stages {self.stages} is more than there are blocks: --layers {self.layers}"
            raise _Misfit(text, "stages", "layers")

    def _check_multiple(self, whole: str, part: str) -> None:
        if getattr(self, whole) % getattr(self, part):
            raise _Misfit(
                f"{_option(whole)} {getattr(self, whole)} must be a multiple of "
                f"{_option(part)} {getattr(self, part)}",
                *(whole, part),
            )

    def to_json(self) -> str:
        """The config as JSON; its paths are absolute, so that a run can be resumed from any folder."""
        return json.dumps({name: _plain(value) for name, value in vars(self).items()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """The config that ``to_json`` wrote. Raises ValueError if the text is anything else."""
        values = json.loads(text)
        if not isinstance(values, dict) or "steps" not in values:
            raise ValueError("not the config of a run")
        return cls(**cls._checked(values))

    def with_file(self, file: Path) -> TrainConfig:
        """This config with the options in a TOML file. Raises UserError for what are no options."""
        try:
            values = tomllib.loads(file.read_text())
            return dataclasses.replace(self, **self._checked({_field(k): v for k, v in values.items()}))
        except OSError as error:
            raise UserError(f"--config {file} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise UserError(f"--config {file}: {error}") from error

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of some fields. Raises ValueError for other names, and values of other types."""
        usual = {field.name: field.default for field in dataclasses.fields(cls)}
        hints = get_type_hints(cls)
        for name, value in values.items():
            if name not in usual:
                close = difflib.get_close_matches(name, usual, 1)
                hint = f": is it {close[0]!r}?" if close else ""
                if isinstance(value, dict):
                    hint = "; options are in no table"
                raise ValueError(f"there is no option {name!r}{hint}")
            hint = hints[name]
            if type(value) not in {t for part in get_args(hint) or [hint] for t in _json_types(part)}:
                raise ValueError(f"{name} is {value!r}, not {_kind(hint)}")
            known = get_args(hint)
            if isinstance(usual[name], str) and known and value not in known:
                raise ValueError(f"{name} is {value!r}; there are {', '.join(map(str, known))}")
        paths = {name: Path(values[name]) for name in PATHS if values.get(name) is not None}
        return {**values, **paths}

    def check_resumes(self, saved: TrainConfig) -> None:
        """Raise UserError if this config changes more than how long, where or in what order it computes."""
        free = {
            "name",
            "config",
            "out",
            "resume",
            "steps",
            "eval_every",
            "keep",
            "sample",
            "profile",
            "tensorboard",
            "wandb",
        }
        free |= {"stages", "tensor", "data_parallel", "context", "expert", "fsdp", "virtual_stages"}
        free |= {"processes", "cluster"}
        free |= {"microbatches", "schedule", "remat", "attention"}
        for field in dataclasses.fields(self):
            before, now = _plain(getattr(saved, field.name)), _plain(getattr(self, field.name))
            moved = field.name in ("data", "model") and None not in (before, now)  # their content is compared
            if field.name not in free and before != now and not moved:
                raise UserError(
                    f"the run was started {_with(field.name, before)}, and --resume cannot go on "
                    f"{_with(field.name, now)}. Start another run with --name"
                )


class _Misfit(UserError):
    """Options, by their fields, that do not go together."""

    def __init__(self, text: str, *options: str):
        super().__init__(text)
        self.options = options


def nearest(config: TrainConfig, options: Sequence[str]) -> str:
    """The nearest values below and above of each of some options with which the config is valid.

    >>> nearest(TrainConfig(batch=20), ["batch", "microbatches"])
    '; --batch 16 or 24, or --microbatches 5 or 10 would do'
    """

    def fits(**change: Any) -> bool:
        try:
            dataclasses.replace(config, **change)._check()
        except UserError:
            return False
        return True

    proposals = []
    for option in options:
        value = getattr(config, option)
        ways = range(value - 1, max(value - FAR, 0), -1), range(value + 1, value + FAR)
        found = [next((n for n in way if fits(**{option: n})), None) for way in ways]
        if values := [str(n) for n in found if n is not None]:
            proposals.append(f"{_option(option)} {' or '.join(values)}")
    return f"; {', or '.join(proposals)} would do" if proposals else ""


def share_of_devices(devices: int, processes: int) -> int:
    """The number of ``devices`` for each of ``processes``. Raises UserError if they do not divide evenly.

    >>> share_of_devices(8, 4)
    2
    """
    if devices % processes:
        *some, last = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        would = f"{', '.join(some)} or {last}" if some else last
        raise UserError(
            f"{processes} processes cannot share {devices} devices ({DEVICES}) equally; {would} would"
        )
    return devices // processes


def _plain(value):
    return str(value.resolve()) if isinstance(value, Path) else value


def _json_types(kind: Any) -> tuple[type, ...]:
    """What a value of a field of this type, or one of its choices, is in JSON and TOML."""
    if isinstance(kind, str) or kind is Path:
        return (str,)
    return (float, int) if kind is float else (kind,)


def _kind(hint: Any) -> str:
    """What a value of a field of this type is called."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return " or ".join(names[part] for part in get_args(hint) or [hint] if part in names) or "text"


def _field(option: str) -> str:
    return option.replace("-", "_")


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _with(field: str, value: Any) -> str:
    if value is None or value is False:
        return f"without {_option(field)}"
    return f"with {_option(field)}{'' if value is True else f' {value}'}"
