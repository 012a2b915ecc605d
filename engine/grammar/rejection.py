"""How a request is told that its grammar is at fault."""

from core.errors import BadRequest, Stage
from core.sampling import Grammar


def rejected(grammar: Grammar, why: str) -> BadRequest:
    """why: completes "the regex …"."""
    return BadRequest(f"the {grammar.kind} {why}", stage=Stage.QUEUE, field="response_format")
