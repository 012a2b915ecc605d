"""Chat messages -> prompt text, by the Jinja template that comes with the model.

The environment is the one `transformers` renders templates in, so that templates written for it
come out the same: sandboxed, immutable, blocks trimmed, loop controls, a JSON filter without HTML
escapes, `raise_exception`, `strftime_now` and the `generation` block.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import BadRequest, ModelUnsupported, Stage

Now = Callable[[], datetime]


class _GenerationBlock(Extension):
    """{% generation %} marks the answer for training; here it just renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.  variables: what it may name besides messages, e.g. bos_token.

    Raises ModelUnsupported when the source is no valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], now: Now = datetime.now) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelUnsupported(
                f"the model's chat template is not valid ({error}); fix it in the model's files",
                stage=Stage.START,
                field="model.ref",
            ) from error

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Text up to where the answer starts.  Raises BadRequest when the template rejects the
        messages, e.g. because of a role it does not know or an order it does not allow."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        # A template is a program: one that meets a message it was not written for may fail in
        # any of these ways.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise BadRequest(
                f"the model's chat template rejects the messages: {error}", field="messages"
            ) from error


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
