"""How a command ends: exit codes, and errors that were foreseen as one line."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import typer

from search.engine import EngineError
from server.settings import SettingsError

T = TypeVar("T")

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; errors that were foreseen become one line."""
    from cli.search_client import ClientError

    try:
        return asyncio.run(work)
    except (SettingsError, EngineError, ClientError) as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def fail(message: str, code: int) -> NoReturn:
    """End the command with one line and an exit code."""
    typer.echo(f"hedgerow: {message}", err=True)
    raise typer.Exit(code)
