"""`core.ports.Tokenizer` over the `tokenizers` library: a thin layer that knows exact bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from core.errors import BadRequest
from engine.text.alphabet import ToBytes
from engine.text.template import ChatTemplate

_NORMALISED = 3


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a model says about its text, apart from the vocabulary.

    vocab_size: rows of the embedding table.  bos_id: put before every prompt; None: nothing is.
    to_bytes: how its vocabulary spells bytes.  template: None when it has no chat template.
    """

    model: str
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    to_bytes: ToBytes
    template: ChatTemplate | None


class TextTokenizer:
    """Immutable after construction, hence thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, facts: TextFacts) -> None:
        # Some files ask for truncation or padding, which would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._facts = facts
        added = backend.get_added_tokens_decoder()
        self._added = {i: b"" if t.special else t.content.encode() for i, t in added.items()}
        self.eos_ids = facts.eos_ids
        self.vocab_size = facts.vocab_size
        # Vocabularies spell a byte in one to three; normalisation may shorten a text to a third.
        self.longest_token = _NORMALISED * max(len(t.encode()) for t in backend.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, after the model's BOS token unless `text` spells that itself, as chat
        templates do.  Raises BadRequest on lone surrogates and on tokens the model lacks."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text is not valid Unicode ({error})", field="prompt") from None
        # A batch of one: only batches let other threads run meanwhile, and this may take seconds.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        beyond = next((i for i in ids if i >= self.vocab_size), None)
        if beyond is not None:
            name = self._backend.id_to_token(beyond)
            raise BadRequest(f"the model has no embedding for the token {name!r}", field="prompt")
        bos = self._facts.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def token_bytes(self, token_id: int) -> bytes:
        """b"" also for an id without a token, such as the padding rows of an embedding table.

        Raises OverflowError for an id below 0.
        """
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._facts.to_bytes(token)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Raises BadRequest when the model has no template, or its template rejects them."""
        if self._facts.template is None:
            raise BadRequest(
                f"model {self._facts.model} has no chat template; use /v1/completions",
                field="messages",
            )
        return self._facts.template.render(messages)
