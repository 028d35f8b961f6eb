"""The work of a compiled fragment, read from XLA's text: operations, bytes moved, and its largest values."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mmnnx.mpmd.ir.flops import Flops, Product
from mmnnx.plan.hlo import CALLS, Array, Computation, Hlo, Instruction

_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]')
_DTYPES = {"bf16": "bfloat16", "pred": "bool"}
_KINDS = {"f": "float", "s": "int", "u": "uint", "c": "complex"}

# No array is made by these, and nothing moves.
_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")
_NO_WORK = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of XLA, with all that is fused to it.

    Attributes:
      flops: in its matrix products and convolutions, two for a product and its sum, by the dtype of operands.
      moved_bytes: what it reads from the device's memory and writes to it.
      runs: how often it, and others that are like it, run.
      beside: whether it goes on beside other operations, as early copies do; or is a collective, which takes
        the time of its links.
    """

    flops: Mapping[str, float]
    moved_bytes: int
    runs: int = 1
    beside: bool = False


@dataclasses.dataclass(frozen=True)
class Value:
    """A large array that a fragment makes inside.

    Attributes:
      shape: as XLA prints it: "f32[1,4096,128256]"; that of one device.
      nbytes: its size.
      name: where the program makes it: JAX's name stack, if XLA kept it.
      count: how many of the same shape and name there are.
    """

    shape: str
    nbytes: int
    name: str
    count: int


def operations(hlo: Hlo, kernels: Mapping[Product, int] | None = None) -> list[Operation]:
    """What a device does: one after the other, but for what goes on beside.

    Of libraries that XLA calls those of cuBLAS, of cuDNN's attention and convolutions, and of `ragged_dot` on
    TPUs have their floating-point operations. XLA's text tells of Pallas kernels only that there are some:
    `kernels` has them.

    An array of which a fusion takes slices counts as the slices, and one that is updated in place as the
    update. What stays within a fusion, or in the core, does not move.
    """
    in_fusions = {name: hlo.total(lambda i, c: _flops(i, hlo.computations[c]), name) for name in hlo.fused}

    def one(i: Instruction, name: str) -> Counter[tuple[Any, int, bool]]:
        computation = hlo.computations[name]
        if kernels and _is_kernel(i):
            return Counter()
        done = in_fusions[i.called()[0]] if i.opcode == "fusion" else _flops(i, computation)
        moved = int(_moved(i, computation, hlo))
        beside = i.opcode.endswith("-start") or i.opcode in _COLLECTIVES
        return Counter({(tuple(done.items()), moved, beside): 1} if done or moved else {})

    found = hlo.total(one, into_fusions=False, size=_size)
    done = [Operation(dict(of), moved, n, beside) for (of, moved, beside), n in found.items()]
    if any(_is_kernel(i) for c in hlo.computations.values() for i in c.values()):  # another platform has none
        done += [Operation({dtype: n}, moved, runs) for (dtype, n, moved), runs in (kernels or {}).items()]
    return done


def _size(key: tuple[Any, int, bool]) -> float:
    """About how long an operation takes: a device computes hundreds of operations while it moves a byte."""
    return sum(n for _, n in key[0]) / 300 + key[1]


def _is_kernel(i: Instruction) -> bool:
    """Whether an instruction is a Pallas kernel."""
    target = (_TARGET.search(i.line) or ["", ""])[1]
    is_one = target == "tpu_custom_call" or "triton" in target or "mosaic" in target
    return i.opcode == "custom-call" and is_one and not i.name.startswith("ragged-dot")


def flops(operations: Iterable[Operation]) -> Flops:
    """The floating-point operations of all, by the dtype of the operands."""
    return sum((Counter({k: o.runs * n for k, n in o.flops.items()}) for o in operations), Counter())


def moved_bytes(operations: Iterable[Operation]) -> int:
    """The bytes that all of them read from the device's memory and write to it."""
    return sum(o.runs * o.moved_bytes for o in operations)


def largest_values(hlo: Hlo, least: int) -> list[Value]:
    """The arrays of at least so many bytes that a fragment makes inside, one by one, the largest first.

    XLA reuses memory: not all of them are there at one time.
    """
    found: defaultdict[tuple[str, int, str], int] = defaultdict(int)
    for i in (i for name, c in hlo.computations.items() if name not in hlo.fused for i in c.values()):
        if i.opcode in (*_NOTHING, "while") or i.opcode.endswith("-done"):
            continue
        for array in i.arrays:
            if array.nbytes >= least:
                found[str(array), array.nbytes, made_by(i)] += 1
    values = (Value(shape, nbytes, name, n) for (shape, nbytes, name), n in found.items())
    return sorted(values, key=lambda v: -v.nbytes)


def made_by(i: Instruction) -> str:
    """Where the program has an instruction from: JAX's name stack, if XLA kept it."""
    name = _NAME.search(i.line)
    return re.sub(r"^jit\([^)]*\)/", "", name[1]) if name else i.opcode


def _flops(i: Instruction, computation: Computation) -> Flops:
    known = all(name in computation for name in i.operands)
    operands = [a for name in i.operands for a in computation[name].arrays[:1]] if known else []
    if i.opcode == "dot":
        return _flops_of_dot(i, operands[0], "lhs_contracting_dims")
    if i.opcode == "convolution":
        return _count(operands[0], _products_of_convolution(i, *operands))
    if i.opcode == "custom-call":
        target = (_TARGET.search(i.line) or ["", ""])[1]
        return _flops_of_library(i, target, operands)
    return Counter()


def _flops_of_dot(i: Instruction, left: Array, attribute: str) -> Flops:
    """Of a matrix product; the attribute has the dimensions of the left operand that are summed over."""
    contracted = _attribute(i.line, attribute)
    return _count(left, i.arrays[0].size * math.prod(left.sizes[d] for d in contracted))


def _flops_of_library(i: Instruction, target: str, operands: list[Array]) -> Flops:
    if target.startswith("__cublas$"):
        return _flops_of_dot(i, operands[0], '"lhs_contracting_dimensions"')
    if target.startswith("__cudnn$fmha") and (scores := _SCORES.search(i.line)):
        # Scores and what is made of them; five products of the same size in the backward.
        products = 5 if "Backward" in target else 2
        sizes = map(int, re.findall(r"\d+", scores[1]))
        return _count(operands[0], products * math.prod(sizes) * operands[0].sizes[-1])
    if target.startswith("__cudnn$conv"):
        # What the forward would take and make: its image, kernel and result.
        image, kernel, result = operands[0], operands[1], i.arrays[0]
        if "BackwardInput" in target:
            image, result = result, image
        elif "BackwardFilter" in target:
            kernel, result = result, kernel
        if labels := _LABELS.search(i.line):
            return _count(kernel, result.size * kernel.size // kernel.sizes[labels[2].index("o")])
    if target == "tpu_custom_call" and i.name.startswith("ragged-dot") and len(operands) > 2:
        # Rows x inner, inner x columns, rows x columns: one of them for each group.
        arrays = [*operands[-2:], i.arrays[0]]
        groups = next((a.sizes[0] for a in arrays if len(a.sizes) == 3), 1)
        return _count(arrays[0], math.isqrt(math.prod(a.size for a in arrays) // groups))
    return Counter()


def _count(operand: Array, products: int) -> Flops:
    parts = re.match(r"([a-z]+)(\d+)(\w*)", operand.dtype)
    if operand.dtype in _DTYPES or parts is None:
        return Counter({_DTYPES.get(operand.dtype, operand.dtype): 2 * products})
    kind, bits, rest = parts.groups()
    return Counter({"_".join(filter(None, (f"{_KINDS[kind]}{bits}", rest))): 2 * products})


def _products_of_convolution(i: Instruction, image: Array, kernel: Array) -> int:
    """How many numbers are multiplied; those with padding, and with zeros between numbers, are not."""
    labels = _LABELS.search(i.line)
    assert labels is not None
    of_image, of_kernel, of_result = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", i.line)
    said = {
        name: [[int(n) for n in one.split("_")] for one in sizes.split("x")]
        for name, sizes in re.findall(r"(\w+)=([\d_x\-]+)", window[1] if window else "")
    }
    result = i.arrays[0]
    sizes = [result.sizes[of_result.index("b")], result.sizes[of_result.index("f")]]
    products = math.prod(sizes) * kernel.sizes[of_kernel.index("i")]
    dimensions = sorted(c for c in of_image if c.isdigit())
    otherwise = {"stride": 1, "rhs_dilate": 1, "lhs_dilate": 1, "pad": 0}
    stride, apart, spread, low = (
        [one[0] for one in said.get(name, [[n]] * len(dimensions))] for name, n in otherwise.items()
    )
    for n, label in enumerate(dimensions):
        made, taken = result.sizes[of_result.index(label)], kernel.sizes[of_kernel.index(label)]
        places = np.arange(made)[:, None] * stride[n] + np.arange(taken) * apart[n] - low[n]
        last = (image.sizes[of_image.index(label)] - 1) * spread[n]
        products *= int(((places >= 0) & (places <= last) & (places % spread[n] == 0)).sum())
    return products


def _moved(i: Instruction, computation: Computation, hlo: Hlo) -> float:
    if i.opcode in (*_NOTHING, "partition-id", "replica-id", "after-all") or i.opcode.endswith("-done"):
        return 0
    if (_TARGET.search(i.line) or ["", ""])[1] in _NO_WORK:
        return 0
    operands = [computation[name] for name in i.operands if name in computation]
    if i.opcode == "fusion":
        return _moved_by_fusion(i, operands, hlo)
    if i.opcode in CALLS:
        return 0
    if i.opcode in _SLICES or i.opcode == "slice-start":
        (part,) = i.arrays[:1] if i.opcode in _SLICES else i.arrays[1:2]
        ends = (*operands[0].arrays[:1], part) if operands else (part,)
        return part.nbytes * sum(not end.space for end in ends)
    if i.opcode in ("dynamic-update-slice", "scatter") and len(operands) > 1:
        (update,) = (operands[-1] if i.opcode == "scatter" else operands[1]).arrays[:1]
        ends = (update, i.arrays[0])
        return update.nbytes * sum(not end.space for end in ends)
    if i.opcode.endswith("-start") and i.opcode != "all-reduce-start":
        return _in_memory(i.arrays)  # which are its operands and its results
    return sum(_in_memory(o.arrays) for o in operands) + _in_memory(i.arrays)


def _moved_by_fusion(fusion: Instruction, operands: list[Instruction], hlo: Hlo) -> float:
    read, written = _read_by_fusion(fusion, hlo), _written_by_fusion(fusion, hlo)
    taken = sum(min(_in_memory(o.arrays), read.get(n, math.inf)) for n, o in enumerate(operands))
    return taken + sum(0 if a.space else min(a.nbytes, n) for a, n in zip(fusion.arrays, written))


def _read_by_fusion(fusion: Instruction, hlo: Hlo) -> dict[int, float]:
    """The bytes that it reads of each operand: slices of it alone, or infinity for all of it."""
    inside = hlo.computations[fusion.called()[0]]
    users: defaultdict[str, list[Instruction]] = defaultdict(list)
    for i in inside.values():
        for name in i.operands:
            users[name].append(i)

    def read(name: str) -> float:
        if inside[name].is_root:
            return math.inf
        total = 0.0
        for user in users[name]:
            if user.opcode == "bitcast":
                total += read(user.name)
            elif user.opcode in _SLICES:
                total += user.arrays[0].nbytes
            elif user.opcode == "fusion":
                inner = _read_by_fusion(user, hlo)
                total += sum(inner[n] for n, operand in enumerate(user.operands) if operand == name)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                return math.inf
        return total

    return {i.parameter: read(i.name) for i in inside.values() if i.parameter is not None}


def _written_by_fusion(fusion: Instruction, hlo: Hlo) -> list[float]:
    """The bytes that it writes of each result: what it updates in place, or infinity for all of it."""
    inside = hlo.computations[fusion.called()[0]]

    def written(i: Instruction) -> list[float]:
        if i.opcode == "tuple":
            return [n for name in i.operands for n in written(inside[name])]
        if i.opcode == "bitcast":
            return written(inside[i.operands[0]])
        if i.opcode == "dynamic-update-slice":
            return [inside[i.operands[1]].arrays[0].nbytes]
        return _written_by_fusion(i, hlo) if i.opcode == "fusion" else [math.inf] * len(i.arrays)

    return [n for i in inside.values() if i.is_root for n in written(i)]


def _in_memory(arrays: tuple[Array, ...]) -> int:
    """The bytes of those that are in the device's memory."""
    return sum(array.nbytes for array in arrays if not array.space)


def _attribute(line: str, name: str) -> list[int]:
    """The numbers of `name={1,2}`, or in JSON of `name: ["1","2"]`."""
    found = re.search(re.escape(name) + r'[=:] ?[\[{]([\d,"\s]*)[\]}]', line)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
