"""Whose turn it is to change the served model: one at a time, checked in the foreground, carried out behind."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from .guard import MitigationBusy


class Turn:
    """Given to one order at a time."""

    def __init__(self) -> None:
        self._checking = False
        self._task: asyncio.Task[None] | None = None

    @property
    def taken(self) -> bool:
        """Is an order being checked or carried out?"""
        return self._checking or (self._task is not None and not self._task.done())

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Around the checks of an order, which may `start` its work at their end; raises `MitigationBusy`."""
        if self.taken:
            raise MitigationBusy("Another mitigation is on its way: wait for it and try again.")
        self._checking = True
        try:
            yield
        finally:
            self._checking = False

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Carry out what was checked, in the background."""
        self._task = asyncio.create_task(work, name=name)

    async def over(self) -> None:
        """Wait for the end of what is carried out, if there is something."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self, grace: float) -> None:
        """Give what is carried out `grace` seconds, then cancel it."""
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=grace)
            if late:
                self._task.cancel()
                await asyncio.wait(late)
