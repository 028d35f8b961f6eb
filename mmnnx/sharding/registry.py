"""Rules from names of scopes to tasks, which `register_task` fills and `find_task` reads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from mmnnx.sharding.path_filter import Path, parts_of

Matcher = str | re.Pattern


@dataclass(frozen=True, eq=False)  # compared by identity: registering again is a new rule
class Rule:
    """One registered matcher, with the task or the callback that makes one."""

    matcher: Matcher
    callback: Callable[[str, bool], Any] | None
    task: Any

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.matcher, "pattern", self.matcher), str):
            raise TypeError(f"a matcher is a name, a regex, or a compiled regex of str, not {self.matcher!r}")
        try:
            re.compile(self.matcher)
        except re.error as error:
            raise ValueError(f"matcher {self.matcher!r} is not a regex: {error}") from None
        if (self.callback is None) == (self.task is None):
            raise ValueError(f"register {self.matcher!r} with one of callback= and task=")
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback= for matcher {self.matcher!r} cannot be called: {self.callback!r}")
        if self.task is not None and not hasattr(self.task, "axis_rules"):  # Task itself imports this module
            raise TypeError(f"task= for matcher {self.matcher!r} is a Task, not {self.task!r}")

    def matches(self, name: str) -> bool:
        """Whether the rule is for this name, one whole component of a name stack."""
        return name == self.matcher or re.fullmatch(self.matcher, name) is not None

    @property
    def pattern(self) -> str:
        """The matcher as text."""
        return self.matcher if isinstance(self.matcher, str) else self.matcher.pattern

    def gives(self, other: Rule) -> bool:
        """Whether it gives the tasks that another gives; of two callbacks only if they are one."""
        return self.callback is other.callback if self.task is None else self.task == other.task

    def __str__(self) -> str:
        return repr(self.task if self.callback is None else self.callback)

    def apply(self, name: str, backprop: bool) -> Any:
        """The Task for a scope; the caller checks that it is one."""
        return self.task if self.callback is None else self.callback(name, backprop)


class Registry:
    """Rules in the order they were registered; the first that matches a name wins."""

    def __init__(self) -> None:
        self._content: Hashable | None = None  # made when it is asked for: most changes come many at a time
        self._rules: list[Rule] = []
        self._placed: dict[tuple[Any, ...], dict[str | None, Any]] = {}  # by the shape and devices of a mesh
        self._owners: dict[tuple[Any, ...], dict[Path, str | None]] = {}  # the same, by path: the name
        self._reasons: dict[Path, tuple[frozenset[Any], str]] = {}  # devices, and the rule that chose them
        self._found: dict[str, Rule | None] = {}  # find() is called for each equation of a program

    def add(self, matcher: Matcher, callback: Callable[[str, bool], Any] | None, task: Any) -> None:
        """Append a rule; TypeError or ValueError unless it is a regex with exactly one of the others."""
        rule = Rule(matcher, callback, task)
        first = next((r for r in self._rules if r.pattern == rule.pattern), rule)
        if not first.gives(rule):
            warnings.warn(
                f"{rule.pattern!r} is registered twice: first with {first}, which stays, and now with "
                f"{rule}, which is never used. mm.clear_tasks() forgets what is registered, but not what is "
                "on a MultiMesh: make a new one",
                stacklevel=3,  # the caller of register_task
            )
        self._rules.append(rule)
        self._changed()

    def place(self, where: tuple[Any, ...], task: Any, paths: Iterable[Path] = ()) -> None:
        """Remember that a task has state on a mesh, of these paths; it replaces one of the same name."""
        tasks, owners = self._placed.setdefault(where, {}), self._owners.setdefault(where, {})
        new = {path: task.name for path in paths if path not in owners or owners[path] != task.name}
        owners.update(new)
        if new or tasks.get(task.name) != task:
            tasks[task.name] = task
            self._changed()

    def placed(self, where: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tasks that have state on a mesh."""
        return tuple(self._placed.get(where, {}).values())

    def owner(self, where: tuple[Any, ...], path: Path) -> Any:
        """The task whose state on a mesh is that of a path, or of a part of it; None where none is known."""
        owners = self._owners.get(where, {})
        part = next((part for part in parts_of(path) if part in owners), None)
        return None if part is None else self._placed[where][owners[part]]

    def explain(self, path: Path, devices: frozenset[Any], rule: str) -> None:
        """Remember which rule has put the state of a path on devices."""
        self._reasons[path] = devices, rule

    def reason(self, path: Path, devices: frozenset[Any]) -> tuple[Path, str] | None:
        """The rule that has put the state of a path, or of a part of it, on devices; and that path."""
        for part in parts_of(path):
            if part in self._reasons and self._reasons[part][0] == devices:
                return part, self._reasons[part][1]
        return None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules."""
        return tuple(self._rules)

    def patterns(self) -> list[str]:
        """The matchers as text."""
        return [rule.pattern for rule in self._rules]

    def places_another(self, task: Any) -> bool:
        """Whether a task of the same name, but not this one, has state somewhere."""
        return any(tasks.get(task.name, task) != task for tasks in self._placed.values())

    def tasks_by_devices(self) -> dict[tuple[tuple[str, int], ...], str]:
        """Names of the tasks that have state somewhere, by the platforms and numbers of the devices."""
        named = {where: [name for name in tasks if name] for where, tasks in self._placed.items()}
        return {where[1:]: " and ".join(names) for where, names in named.items() if names}

    def clear(self) -> None:
        """Forget all rules and tasks."""
        self._rules.clear()
        self._placed.clear()
        self._owners.clear()
        self._reasons.clear()
        self._changed()

    def _changed(self) -> None:
        self._found.clear()
        self._content = None

    @property
    def content(self) -> Hashable:
        """All that it holds, as a key for caches: registries of equal content give equal answers."""
        if self._content is None:
            self._content = self._gathered(lambda path: True)
        return self._content

    def content_for(self, paths: Iterable[Path]) -> Hashable:
        """The same without state that has no part in a function whose state has these paths."""
        parts = {(), *(part for path in paths for part in parts_of(path))}
        # The path of a piece of divided state is longer by one.
        return self._gathered(lambda path: path in parts or path[:-1] in parts)

    def _gathered(self, counts: Callable[[Path], bool]) -> Hashable:
        # Whose state is where makes a difference to a program where one mesh has that of several tasks.
        return (
            *self._rules,
            *((where, *tasks.values()) for where, tasks in self._placed.items()),
            *(
                (where, *(owned for owned in self._owners[where].items() if counts(owned[0])))
                for where, tasks in self._placed.items()
                if len(tasks) > 1
            ),
        )

    def find(self, name: str) -> Rule | None:
        """The first rule that matches `name`."""
        if name not in self._found:
            self._found[name] = next((rule for rule in self._rules if rule.matches(name)), None)
        return self._found[name]
