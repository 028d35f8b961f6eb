"""The message that says how the state in a checkpoint and the state to restore differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from etils.epath import Path as FilePath

from mmnnx.sharding.path_filter import path_text
from mmnnx.train.checkpoint.errors import Differences, Path


def explain(step: FilePath, found: Differences, stored: Iterable[Path], wanted: Iterable[Path]) -> str:
    """All differences, and what to do.

    A subtree that is missing as a whole (a layer, the state of an optimizer) is one line, and so are layers
    that differ in the same way.

    Args:
      step: the checkpoint's folder.
      found: the differences.
      stored, wanted: all paths of the checkpoint, and of what is to be restored.
    """
    where = {*found.missing, *found.extra, *found.shapes, *found.dtypes}
    lines = [f"the state to restore differs from that in {step}:"]
    if all("opt_state" in path for path in where):
        lines.append("  this is not the optimizer that was saved: make the same, or restore without it")
    names = list(dict.fromkeys(path[0] for path in stored))
    absent = list(dict.fromkeys(path[0] for path in found.missing if path[0] not in names))
    lines += [f"  there is no {name!r} in it; it holds {', '.join(map(repr, names))}" for name in absent]
    missing = _gather({p: text for p, text in found.missing.items() if p[0] not in absent}, stored)
    extra = _gather(found.extra, wanted)
    for name, text in missing.items():
        close = get_close_matches(name, extra, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        lines.append(f"  not in the checkpoint: {name} {text}{hint}")
    lines += [f"  only in the checkpoint: {name} {text}" for name, text in extra.items()]
    for kind, differing in (("shape", found.shapes), ("dtype", found.dtypes)):
        texts = {path: f"is {ours}, in the checkpoint {its}" for path, (ours, its) in differing.items()}
        lines += [f"  other {kind}: {name} {text}" for name, text in _merged(texts).items()]
    lines.append(
        'rename={"path.in.checkpoint": "path.in.nodes"} maps paths or their beginnings; partial=True '
        "restores what fits"
    )
    return "\n".join(lines)


def _gather(texts: Mapping[Path, str], others: Iterable[Path]) -> dict[str, str]:
    """Differences by name, as few as possible: under the shortest prefix that no path of the others has."""
    known = {path[:length] for path in others for length in range(len(path) + 1)}
    groups: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in texts:
        part = " of it" in texts[path]  # layers that are left over of a stack
        length = next((n for n in range(1, len(path)) if path[:n] not in known and not part), len(path))
        groups[path[:length]].append(path)
    return _merged(
        {
            start: texts[start] if paths == [start] else f"({len(paths)} array{'s' * (len(paths) > 1)})"
            for start, paths in groups.items()
        }
    )


def _merged(texts: Mapping[Path, str]) -> dict[str, str]:
    """One line for all paths that are equal up to numbers and have the same text: the name, and the text."""
    groups: defaultdict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path, text in texts.items():
        groups[tuple("*" if key.isdigit() else key for key in path), text].append(path)
    lines = {}
    for (_, text), paths in groups.items():
        keys = (at[0] if len(set(at)) == 1 else "*" for at in zip(*paths))
        lines[path_text(keys)] = text + (f", {len(paths)} times" if len(paths) > 1 else "")
    return lines
