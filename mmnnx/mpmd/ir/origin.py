"""What a value is made of: literals, state of one home, or anything else."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from jax.sharding import Mesh


# What a value is made of. It decides who must hold it and what a piece of computation is tied to.
class Kind(enum.Enum):
    CONST = "const"  # of literals alone
    FREE = "free"  # of unplaced inputs: batches, counters, keys
    STATE = "state"  # of placed state of one home
    ACTIVATION = "activation"  # of anything else


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The kind of a value, and its mesh.

    Attributes:
      kind: of the value.
      home: the home of state; of an activation, the mesh where it is made. None for all else, and for an
        activation that is not placed yet.
    """

    kind: Kind
    home: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of state, or of an activation that is placed."""
        assert self.home is not None
        return self.home


CONST, FREE, ACTIVATION = Origin(Kind.CONST), Origin(Kind.FREE), Origin(Kind.ACTIVATION)


def at_home(home: Mesh | None) -> Origin:
    """The origin of state that lives on a mesh, or of an unplaced input."""
    return FREE if home is None else Origin(Kind.STATE, home)


def combine(origins: Iterable[Origin]) -> Origin:
    """The origin of what is computed from values of the given origins."""
    out = CONST
    for origin in origins:
        if origin == out or origin.kind is Kind.CONST:
            continue
        elif out.kind is Kind.CONST:
            out = origin
        else:
            return ACTIVATION
    return out
