"""How tokens are chosen, and how likely they were: what a request says, what a step answers."""

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """JSON_SCHEMA: a schema as JSON text, "" for any JSON object.  STRUCTURAL_TAG: xgrammar's
    structural tag format as JSON text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


MAX_GRAMMAR_BYTES = 64 << 10
"""Of UTF-8, in the source of a grammar."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class LogitBias:
    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class BadWord:
    """A token sequence that must not come to be."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens.  temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    The random number of output position i depends on (seed, i) alone, so that a batch,
    a retry or a migration cannot change what is sampled.
    max_tokens counts output tokens from the first of the request, over all attempts.
    repetition_penalty divides positive logits (multiplies negative ones) of every token seen in
    prompt or output; presence and frequency penalties are subtracted for output tokens only.
    min_tokens: no end-of-sequence or stop token before this many.
    logprobs: None for none, else how many alternatives beside the chosen token's own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[LogitBias, ...] = ()
    bad_words: tuple[BadWord, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def penalises(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def looks_back(self) -> bool:
        """What comes next depends on the tokens before, besides through the model."""
        return self.penalises or bool(self.bad_words) or self.grammar is not None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, of the target model's distribution before temperature and cuts.

    top: the likeliest tokens, best first, as many as were asked for.
    """

    logprob: float
    top: tuple[TokenLogprob, ...] = ()
