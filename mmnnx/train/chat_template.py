"""Chat templates: programs in Jinja that make text of a conversation, run as `transformers` runs them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


def read_template(source: str) -> Template:
    """The program of a chat template, which takes longer to read than a conversation to render.

    With `marks`, two strings, it puts them around what is in `{% generation %}` blocks.

    Example:
      >>> template = read_template("Q: {{ q }} A: {% generation %}{{ a }}{% endgeneration %}")
      >>> template.render(q="1 + 1?", a="2", marks="[]")
      'Q: 1 + 1? A: [2]'
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("marked", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def marked(self, context: Context, caller: Macro) -> str:
        start, end = context.get("marks") or ("", "")
        return f"{start}{caller()}{end}"


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own would write <, > and & for HTML."""
    return json.dumps(value, **({"ensure_ascii": False, "indent": indent} | options))
