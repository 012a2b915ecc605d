"""Pieces of text to OpenAI answers: one object, or a stream of chunks.  Pure.

Extensions sit on the choice, since they describe one generation: `token_ids` and
`prompt_token_ids` with return_token_ids, `trireme` with return_trace and wherever the answer is
lossy.  In a stream each chunk has the token ids and log probabilities of the tokens that came
since the one before, the choice's last chunk the other two.
"""

from collections.abc import Sequence

from core.messages import FinishReason
from core.ports import Tokenizer
from router.prepare import Job
from router.schema_errors import Json, dumps
from router.shapes import trace, usage
from router.streaming import Piece, TextGeneration, TextToken


class Answer:
    """The answer to one job; reads the generations as they are when a choice ends."""

    def __init__(
        self,
        job: Job,
        generations: Sequence[TextGeneration],
        tokenizer: Tokenizer,
        arrived: float,
    ) -> None:
        self._job = job
        self._generations = generations
        self._tokenizer = tokenizer
        self._arrived = arrived
        self._opened: set[int] = set()

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """The JSON of an answer that is not streamed; every choice has its last piece."""
        choices = []
        for index in range(len(self._generations)):
            mine = [piece for piece in pieces if piece.index == index]
            text = "".join(piece.text for piece in mine)
            tokens = tuple(token for piece in mine for token in piece.tokens)
            finish = mine[-1].finish or FinishReason.STOP
            choice = self._job.shape.whole(index, text, finish)
            choices.append(self._extend(choice, tokens, last=True))
        body = self._envelope(self._job.shape.whole_object, choices)
        return dumps(body | {"usage": self._counted()})

    def chunks(self, piece: Piece) -> bytes:
        """The server-sent events of one piece; a choice's first has its opening before it."""
        shape, index, tokens = self._job.shape, piece.index, piece.tokens
        choices = []
        opening = None if index in self._opened else shape.opening(index)
        self._opened.add(index)
        if opening:
            choices.append(self._extend(opening, (), last=False))
        if piece.text:
            choices.append(self._extend(shape.delta(index, piece.text, None), tokens, last=False))
            tokens = ()
        if piece.finish:
            choices.append(self._extend(shape.delta(index, "", piece.finish), tokens, last=True))
        return b"".join(self._event([choice]) for choice in choices)

    def ending(self) -> bytes:
        """What follows the last choice: usage if asked for, and the end mark."""
        done = b"data: [DONE]\n\n"
        return self._event([], self._counted()) + done if self._usage else done

    def _counted(self) -> Json:
        return usage(self._generations, self._job.options.n)

    @property
    def _usage(self) -> bool:
        return self._job.options.include_usage

    def _event(self, choices: list[Json], counted: Json | None = None) -> bytes:
        body = self._envelope(self._job.shape.chunk_object, choices)
        return event(body | {"usage": counted} if self._usage else body)

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        job = self._job
        return {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": job.options.model,
            "choices": choices,
        }

    def _extend(self, choice: Json, tokens: tuple[TextToken, ...], last: bool) -> Json:
        options, generation = self._job.options, self._generations[choice["index"]]
        if tokens and options.sampling.logprobs is not None:
            choice["logprobs"] = self._job.shape.logprobs(tokens, self._tokenizer.token_bytes)
        if options.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            if last:
                choice["prompt_token_ids"] = generation.request.tokens
        if options.return_trace and last:
            choice["trireme"] = trace(generation.accounting, self._arrived)
        elif last and generation.accounting.lossy:
            choice["trireme"] = {"lossy": list(generation.accounting.lossy)}
        return choice


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(body) + b"\n\n"
