"""What a run reads before it starts JAX: the data, as batches of tokens."""

from __future__ import annotations

import dataclasses

import grain

from mmnnx.train.batches import train_batches, valid_batches
from mmnnx.train.config import TrainConfig
from mmnnx.train.data import Corpus, load_corpus
from mmnnx.train.errors import UserError
from mmnnx.train.rows import Row, Rows, rows_of
from mmnnx.train.step import model_config
from mmnnx.train.tokens import Codec, codec_of


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
      codec: how its text is made of tokens.
      rows: those to train on.
      batches: of them, without end; its state says which comes next.
      held_out: the batches that validate.
    """

    codec: Codec
    corpus: Corpus
    rows: Rows
    batches: grain.DatasetIterator
    held_out: list[Row]


def read_data(config: TrainConfig) -> Data:
    """The data that a config names.

    Raises:
      UserError: for data or a tokenizer that cannot be read, or that do not go with the other options.
    """
    codec, sizes = codec_of(config.model), model_config(config)
    if codec.vocab > sizes.vocab:
        raise UserError(
            f"{config.model} has {sizes.vocab} tokens, and its tokenizer {codec.vocab} (without a "
            "tokenizer.json a token is a byte)"
        )
    corpus = load_corpus(config.data, codec, config.loss_on)
    rows, held_out = (rows_of(text, config.sequence, config.packing) for text in (corpus.train, corpus.valid))
    batches = train_batches(rows, config.batch, config.seed)
    return Data(codec, corpus, rows, batches, valid_batches(held_out, config.batch))
