"""The command ``mmnnx generate``: text from a published model or from a run."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import numpy as np
import tyro
from rich.console import Console

import mmnnx as mm
from mmnnx.modules.generate import generate
from mmnnx.options import optional, parse_options, reported
from mmnnx.output import current
from mmnnx.printable import printable
from mmnnx.train.config import Precision
from mmnnx.train.errors import UserError
from mmnnx.train.read_model import read_model, stage_mesh
from mmnnx.train.tokens import Codec


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Print what a model writes after a prompt, as it comes; after several prompts, when all is there."""

    model: tyro.conf.Positional[str]
    """The folder of a run, the gs:// URL of its checkpoints, or the folder of a published model.
    Of a run with --ema it is the averages of its weights."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]")]
    """What the text begins with; several are written at the same time."""
    chat: bool = False
    """The prompt is what a user says: the model's chat template is put around it."""
    tokens: int = 128
    """Most tokens to write; it ends before at a token that ends a text or a turn."""
    temperature: float = 0.0
    """What the logits are divided by; 0 takes the likeliest token."""
    top_p: Annotated[float | None, optional("FLOAT", "all tokens")] = None
    """Tokens are drawn from the likeliest ones whose probabilities add up to it."""
    seed: int = 0
    """Of the draw."""
    stages: int = 1
    """Pipeline stages that the layers are split over."""
    tensor: int = 1
    """Devices over which the weights of a stage are split."""
    in_flight: Annotated[int | None, optional("INT", "the fewest equal groups that keep all stages busy")] = (
        None
    )
    """Groups of prompts that follow each other through the stages, so that none waits."""
    prefill_chunk: Annotated[int | None, optional("INT", "all")] = None
    """Tokens of a prompt that are read at once; the parts follow each other through the stages."""
    precision: Annotated[
        Precision | None, optional("{float32,bfloat16}", "that of the run; float32 for a published model")
    ] = None
    """Type to compute in; a published model's weights are kept in it, too."""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx generate`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0, or 2 for a mistake in the options.
    """
    config = parse_options(GenerateConfig, "generate", options)
    return reported(lambda: write(config), print_error, UserError, ValueError)


def write(config: GenerateConfig) -> int:
    """Prints the text after each prompt. Returns the exit status, 0.

    Raises:
      UserError: for a folder that holds no model, or options that do not go together.
    """
    if not config.prompt:
        raise UserError("--prompt: give at least one text")
    if config.tokens < 1:
        raise UserError(f"--tokens {config.tokens}: generate at least one")
    if config.top_p is not None and not config.temperature:
        raise UserError("--top-p is for drawing, and --temperature 0 takes the likeliest token")
    mesh = stage_mesh(config.stages, config.tensor)
    with mesh:
        model, codec = read_model(config.model, config.stages, config.precision)
        rows = [encode(codec, text, config.chat) for text in config.prompt]
        lengths = [len(row) for row in rows]
        if not min(lengths):
            raise UserError("--prompt: the text is empty, and a model begins with a token")
        padded = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows])
        stream = None
        if len(rows) == 1:
            stream = Stream(codec, "" if config.chat else config.prompt[0])
        began = time.perf_counter()
        made = generate(
            model,
            padded,
            config.tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            key=jax.random.key(config.seed) if config.temperature else None,
            eos=codec.ends,
            lengths=lengths if len(rows) > 1 else None,
            in_flight=groups(len(rows), config.stages) if config.in_flight is None else config.in_flight,
            prefill_chunk=config.prefill_chunk,
            on_token=stream,
        )
        tokens = mm.fetch(made)
        seconds = time.perf_counter() - began
    if stream is None:
        for prompt, row in zip(config.prompt, tokens):
            begin = f"{prompt}\n" if config.chat else prompt
            say(f"{begin}{codec.decode(until(row, codec.ends))}\n\n")
    else:
        stream.end()
    count = sum(len(until(row, codec.ends)) for row in tokens)
    Console(stderr=True, highlight=False, quiet=current.get().quiet).print(
        f"{count} tokens in {seconds:.1f} s, with what was compiled", markup=False
    )
    return 0


def encode(codec: Codec, text: str, chat: bool) -> np.ndarray:
    """The tokens of a prompt, without the one that ends a text."""
    if chat:
        text = codec.chat([{"role": "user", "content": text}], answer=True)
    tokens = codec.encode(text.encode(), chat)
    return tokens[:-1] if len(tokens) and tokens[-1] == codec.end else tokens


def groups(rows: int, stages: int) -> int:
    """The fewest groups of equal size that keep all stages busy; fewer where there are not so many rows."""
    return min((n for n in range(stages, rows) if rows % n == 0), default=rows) if stages > 1 else 1


def until(tokens: np.ndarray, ends: Sequence[int]) -> list[int]:
    """The tokens before the first of those that end a text."""
    return list(itertools.takewhile(lambda token: token not in ends, tokens.tolist()))


class Stream:
    """Prints a prompt, and tokens as they come: whole characters, which may be several tokens.

    All that is printed is the text of all tokens, but each time few are decoded: the new ones, after those
    that were printed last, as the text of a token may hang on the one before it (a first space is dropped).
    """

    def __init__(self, codec: Codec, prompt: str):
        self._codec, self._prompt = codec, prompt
        self._tokens: list[int] = []  # those that were printed last, and those that were not yet
        self._shown = 0  # how many of these were
        self._ended = False

    def __call__(self, tokens: np.ndarray) -> None:
        say(self._prompt)
        self._prompt = ""
        self._ended |= int(tokens[0]) in self._codec.ends
        if self._ended:
            return
        self._tokens.append(int(tokens[0]))
        text = self._new()
        if text and not text.endswith("\ufffd"):
            say(text)
            del self._tokens[: self._shown]
            self._shown = len(self._tokens)

    def end(self) -> None:
        """Prints what is left, which is no whole character, and ends the line."""
        say(f"{self._new()}\n")

    def _new(self) -> str:
        before = self._codec.decode(self._tokens[: self._shown])
        return self._codec.decode(self._tokens)[len(before) :]


def say(text: str) -> None:
    """Writes what a model wrote: as it is, but for what a terminal would take for commands."""
    print(printable(text, keep="\n\t"), end="", flush=True)
