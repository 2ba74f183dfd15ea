"""The folder for files made once on this machine: compiled functions, converted checkpoints."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/hedgerow`` or ``~/.cache/hedgerow``, made if need be, owned by the user.
    If there can be none, a temporary folder that is removed when this process ends."""
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # nowhere to write, or no home
        folder = (Path(home) if home else Path.home() / ".cache") / "hedgerow"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="hedgerow-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
