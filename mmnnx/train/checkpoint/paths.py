"""Where checkpoints are kept: a folder on a file system, or in a bucket of Google Cloud Storage."""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re

from etils import epath
from fsspec.config import conf

from mmnnx.train.checkpoint.errors import CheckpointError

BUCKET = "gs://"


def in_bucket(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is in a bucket, where nothing can be locked, or renamed at once."""
    return os.fspath(folder).startswith(BUCKET)


def folder_at(place: str | os.PathLike[str]) -> epath.Path:
    """The folder at a path or a URL; nothing is read or written.

    Raises:
      CheckpointError: for a URL of another store, and a path that orbax would take for something else.

    >>> folder_at("gs://bucket/lm/")
    PosixGPath('gs://bucket/lm')
    """
    text = os.fspath(place)
    if re.match(f"{BUCKET}[^/]", text):
        if importlib.util.find_spec("gcsfs") is None:
            raise CheckpointError(f"{text}: buckets are read and written by gcsfs; pip install 'mmnnx[gcs]'")
        # What gcsfs remembers of listings would not show what tensorstore and other processes write.
        conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
        where = BUCKET + posixpath.normpath(text.removeprefix(BUCKET))
    elif re.match(r"\w\w+:/", text):
        raise CheckpointError(
            f"{text}: checkpoints are kept on a file system, or in Google Cloud Storage by the URL "
            "gs://BUCKET/FOLDER, a string (pathlib makes one slash of two); orbax writes to no other object "
            "store, and not to S3"
        )
    else:
        where = os.path.abspath(text)  # tensorstore opens no path with .. in it
    if wild := re.search(r"[*?[#]" if in_bucket(where) else r"[*?[]", where):
        raise CheckpointError(
            f"{where}: orbax would take {wild[0]!r} in a path for a pattern, or for a version of a file, and "
            "not find what it has written; choose another folder, or a link to it without it"
        )
    if str(folder := epath.Path(where)) != where:
        raise CheckpointError(f"{where}: orbax would take it for {folder}; choose another folder, or a link")
    return folder


def kvstore(folder: epath.Path) -> dict[str, str]:
    """What tensorstore calls a folder."""
    if in_bucket(folder):
        bucket, _, path = str(folder).removeprefix(BUCKET).partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    return {"driver": "file", "path": f"{folder}/"}
