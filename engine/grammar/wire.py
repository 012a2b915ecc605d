"""What a worker and the process that compiles its grammars say to each other.

worker ──▶ vocabulary, then grammars        JSON
worker ◀── READY, then for each: DONE and the compiled grammar, or FAILED and why
"""

import json

from core.sampling import Grammar, GrammarKind
from engine.grammar.vocabulary import Vocabulary

READY, DONE, FAILED = b"r", b"d", b"f"
_BYTES_AS_TEXT = "latin-1"


def pack_vocabulary(vocabulary: Vocabulary) -> bytes:
    tokens = [token.decode(_BYTES_AS_TEXT) for token in vocabulary.tokens]
    return json.dumps([tokens, vocabulary.eos_ids]).encode()


def unpack_vocabulary(body: bytes) -> Vocabulary:
    tokens, eos_ids = json.loads(body)
    return Vocabulary(tuple(token.encode(_BYTES_AS_TEXT) for token in tokens), tuple(eos_ids))


def pack_grammar(grammar: Grammar) -> bytes:
    return json.dumps([grammar.kind, grammar.source]).encode()


def unpack_grammar(body: bytes) -> Grammar:
    kind, source = json.loads(body)
    return Grammar(GrammarKind(kind), source)
