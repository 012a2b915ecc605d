"""The vocabulary; texts as one row of tokens, and pieces of such a row."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END = "<|endoftext|>"
"""After every document; id 0."""
VOCAB_SIZE = 1024
SNIPPET = 128
"""Tokens of the texts whose signatures are compared."""
_SHARE = 250_000
"""Characters of each domain that the merges are learned from."""


def learn_tokenizer(texts: Mapping[str, Sequence[str]]) -> Tokenizer:
    """Byte-level BPE with an equal share for every domain; a number is spelled in digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_shares(texts), trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """All of a domain's documents, int64 [tokens]."""
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(list(texts))
    return torch.tensor([i for e in encoded for i in (*e.ids, end)])


def windows(stream: Tensor, rows: int, length: int, source: torch.Generator) -> Tensor:
    """[rows, length] from random places of `stream`."""
    starts = torch.randint(len(stream) - length, (rows, 1), generator=source)
    return stream[starts + torch.arange(length)]


def snippets(tokens: Tensor) -> Tensor:
    """[tokens] -> [snippets, SNIPPET]; a shorter rest is left out."""
    return tokens[: len(tokens) // SNIPPET * SNIPPET].view(-1, SNIPPET)


def _shares(texts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for documents in texts.values():
        yield "\n".join(documents)[:_SHARE]
