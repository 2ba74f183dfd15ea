"""Where what is made once on this machine is kept: compiled functions, converted checkpoints."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/hedgerow`` or ``~/.cache/hedgerow``, made if need be; nobody else writes
    there. For want of one a folder of this process's, which ends with it."""
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
