"""The site that `make docs` builds: these pages, the notebooks, and a reference made of docstrings.

The root of its sources is the repository, so that the links between pages, notebooks and files of code are
those that one follows in a clone.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.nodes import Element
from flax import nnx
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.inspect import stringify_signature
from sphinx.util.logging import getLogger

project = "mmnnx"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "notebooks/*", "benchmarks/**.md"]
exclude_patterns = ["**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = "mmnnx"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_extra_path = ["root"]  # the first page of the site is docs/index.html
html_copy_source = False
html_show_copyright = False

smartquotes_action = "D"  # dashes, which napoleon writes as two hyphens
myst_heading_anchors = 4  # links to headings, as a clone shows them
nb_merge_streams = True  # what a cell prints is one text, however many pieces it came in
nb_execution_mode = "off"  # notebooks are committed with what they show, and tests run them

default_role = "py:obj"  # `name` in a docstring is a link where the reference has the name
autodoc_default_options = {"members": True, "member-order": "bysource", "special-members": "__call__"}
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"

PUBLIC = [
    "mmnnx",
    "mmnnx.inspect",
    "mmnnx.modules",
    "mmnnx.modules.hf",
    "mmnnx.plan",
    "mmnnx.sharding",
    "mmnnx.train",
    "mmnnx.train.checkpoint",
    "multimesh_compat",
    "multimesh_compat.jax",
    "multimesh_compat.jax.flax",
]
log = getLogger(__name__)


def in_the_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that no page of the reference has; one of several packages may be in any."""
    names = defaultdict(set)
    for package in map(importlib.import_module, PUBLIC):
        for name in package.__all__:
            x = getattr(package, name)
            if getattr(x, "__module__", "mmnnx").startswith(("mmnnx", "multimesh_compat")):
                names[id(x)].add(f"{package.__name__}.{name}")
    documented = env.get_domain("py").objects.keys()
    for missing in (found for found in names.values() if not found & documented):
        log.warning("no page of docs/reference has %s", " or ".join(sorted(missing)))


def short_names(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element) -> Element | None:
    """`mm.name` in a docstring is `mmnnx.name`, and must be in the reference."""
    name = node["reftarget"]
    if not re.fullmatch(r"mm(\.\w+)+", name):
        return None  # code, or a name of JAX
    full = f"mmnnx{name[2:]}"
    found = env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, text)
    if found is None:
        log.warning("the reference has no %s", name, location=node)
    return found


def as_restructured_text(app: Sphinx, what: str, name: str, x: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read: the plural of `Task`s, **options, and --options."""
    if what == "attribute":
        lines[:0] = ["..", ""]  # an empty comment, or napoleon takes what is before a colon for a type
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = re.split(r"(``.*?``|`[^`]*`)", line)  # the code in it is every other one
            pieces[::2] = [re.sub(r"\*", r"\\*", piece) for piece in pieces[::2]]
            pieces[::2] = [re.sub(r"(?<![\w-])--[a-z][\w-]*", r"``\g<0>``", piece) for piece in pieces[::2]]
            pieces[2::2] = [re.sub(r"^(?=\w)", r"\\ ", piece) for piece in pieces[2::2]]
            lines[i] = "".join(pieces)


def of_init(app: Sphinx, what: str, name: str, x: Any, *_: Any) -> tuple[str, None] | None:
    """The signature of an NNX module, which its metaclass hides."""
    if what != "class" or not issubclass(x, nnx.Module):
        return None
    signature = inspect.signature(x.__init__)
    arguments = list(signature.parameters.values())[1:]  # without self
    return stringify_signature(signature.replace(parameters=arguments), unqualified_typehints=True), None


def folders_are_text(app: Sphinx, page: str, source: list[str]) -> None:
    """A link to a folder is for those who read the page in a clone."""
    here = Path(app.env.doc2path(page)).parent
    link = lambda found: found[1] if (here / found[2]).is_dir() else found[0]
    source[0] = re.sub(r"\[([^\]]*)\]\(([^)#:]+)\)", link, source[0])


def dark_pictures(app: Sphinx, document: nodes.document) -> None:
    """A reader of the dark theme sees x-dark.png where a page shows x.png, if there is one."""
    for light in list(document.findall(nodes.image)):
        file = Path(light["uri"])
        dark = file.with_stem(f"{file.stem}-dark")
        if (Path(document["source"]).parent / dark).is_file():
            light["classes"].append("only-light")
            other = nodes.image(**{**light.attributes, "uri": str(dark), "classes": ["only-dark"]})
            light.parent.insert(light.parent.index(light) + 1, other)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", dark_pictures, priority=100)  # before the files of pictures are collected
    app.connect("source-read", folders_are_text)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before that of napoleon
    app.connect("autodoc-process-signature", of_init)
    app.connect("env-check-consistency", in_the_reference)
    app.connect("missing-reference", short_names)
