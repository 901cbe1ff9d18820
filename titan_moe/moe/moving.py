"""A dispatch or a combine that is under way.

It is a chain: rows are copied for the wire, an exchange starts, somebody waits for it, and so on for each hop, until
what arrived is copied to where it is wanted. Who has something else to do asks for the result later; with several hops
he may come by in between, so that the next one starts.
"""

from collections.abc import Generator
from typing import Generic, TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # stands still wherever an exchange has started


class Moving(Generic[Result]):
    """Rows under way. The first exchange has started when it is made.

    Arguments:
        steps: what there is to do, which yields after each start of an exchange and returns the result.
        hops: exchanges.
    """

    def __init__(self, steps: Steps[Result], hops: int) -> None:
        self._steps, self._left = steps, hops
        self._result: list[Result] = []
        self._next()

    @classmethod
    def done(cls, result: Result) -> "Moving[Result]":
        """Of something that has been waited for."""

        def steps() -> Steps[Result]:
            yield from ()
            return result

        return cls(steps(), 0)

    def _next(self) -> None:
        try:
            next(self._steps)
        except StopIteration as end:
            self._result.append(end.value)

    def advance(self) -> None:
        """If another exchange follows the present one, wait for this and start that."""
        if self._left > 1 and not self._result:
            self._left -= 1
            self._next()

    def wait(self) -> Result:
        """The result, after all exchanges."""
        while not self._result:
            self._next()
        return self._result[0]
