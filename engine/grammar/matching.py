"""What this package asks of a grammar library."""

from typing import Protocol

from torch import Tensor

from core.sampling import Grammar


class Matcher(Protocol):
    """How far an output has got in its grammar.  For one thread."""

    @property
    def ended(self) -> bool:
        """It has taken an end-of-sequence token: nothing may follow."""
        ...

    @property
    def complete(self) -> bool:
        """What it has taken may be the whole output."""
        ...

    def take(self, token: int) -> bool:
        """Go on by a token; False, and nothing changed, when the grammar does not allow it."""
        ...

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` that were taken."""
        ...

    def fill(self, row: Tensor) -> None:
        """row: int32 [ceil(vocab / 32)] on the CPU.  Sets the bits of the tokens that may come
        next, and clears all others."""
        ...


class Compiled(Protocol):
    """A grammar ready to be matched.  Immutable; thread-safe."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher: ...


class Compiler(Protocol):
    """For one thread, but `close` may come from any."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Blocks, for a bounded time.  Raises BadRequest when the grammar is at fault, another
        TriremeError when it is not."""
        ...

    def close(self) -> None:
        """A compile under way fails soon."""
        ...
