"""A JSON file that holds an object, as most files beside the weights of a published model do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(file: Path) -> dict[str, Any]:
    """The fields of a JSON file.

    Raises:
      ValueError: for one that is damaged, or no object; names it.
    """
    try:
        found = json.loads(file.read_text())
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object, but a {type(found).__name__}")
    return found
