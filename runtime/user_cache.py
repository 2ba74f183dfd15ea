"""The folder for files made once on this machine: compiled functions, converted checkpoints."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from stat import S_IWGRP, S_IWOTH

log = logging.getLogger(__name__)


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/hedgerow`` or ``~/.cache/hedgerow``, made if need be.

    What lies there is executed, so the user must own it and nobody may write to it but the user
    and the user's primary group (Kubernetes gives its volumes to that). If there is no such folder,
    a temporary one that is removed when this process ends.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # nowhere to write, or no home
        folder = (Path(home) if home else Path.home() / ".cache") / "hedgerow"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _own(folder.stat()) and os.access(folder, os.W_OK):
            return folder
    return _temporary_folder()


def _own(folder: os.stat_result) -> bool:
    foreign = S_IWOTH if folder.st_gid == os.getgid() else S_IWOTH | S_IWGRP
    return folder.st_uid == os.getuid() and not folder.st_mode & foreign


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="hedgerow-")
    log.warning(
        "no cache folder that this user alone can write to: compiled functions and "
        "converted checkpoints are made anew at every start"
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
