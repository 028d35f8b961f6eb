"""A value in pieces, and how a dimension is divided."""

from __future__ import annotations

from dataclasses import dataclass

from mmnnx.mpmd.ir.equations import Atom


@dataclass(frozen=True)
class Cut:
    """How a value is divided: along which dimension, and the size of each piece there."""

    dim: int
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of the whole dimension."""
        return sum(self.sizes)

    def shape(self, whole: tuple[int, ...], n: int) -> tuple[int, ...]:
        """The shape of piece `n` of a value."""
        return (*whole[: self.dim], self.sizes[n], *whole[self.dim + 1 :])

    def moved(self, dim: int, size: int) -> Cut | None:
        """The same parts of another dimension, of another size; None if they do not come out even there."""
        if any(n * size % self.size for n in self.sizes):
            return None
        return Cut(dim, tuple(n * size // self.size for n in self.sizes))

    def __str__(self) -> str:
        return f"pieces of {', '.join(map(str, self.sizes))}"


Key = tuple[int, tuple[Atom, ...]]


@dataclass(frozen=True)
class Pieces:
    """A value in pieces.

    Attributes:
      dim: the dimension along which they follow each other.
      atoms: the pieces, in order.
      name: what messages call it: the argument that it was made of.
    """

    dim: int
    atoms: tuple[Atom, ...]
    name: str

    @property
    def cut(self) -> Cut:
        """How it is divided."""
        return Cut(self.dim, tuple(a.aval.shape[self.dim] for a in self.atoms))

    @property
    def key(self) -> Key:
        """Equal for what is one value. (The first piece of a value may be that of a slice as well.)"""
        return self.dim, self.atoms

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""
        whole = list(self.atoms[0].aval.shape)
        whole[self.dim] = self.cut.size
        return tuple(whole)


Value = Atom | Pieces
