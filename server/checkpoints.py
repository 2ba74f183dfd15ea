"""Where a model lies: a folder, or the local copy of what a Hugging Face name stands for."""

from __future__ import annotations

import re
from pathlib import Path

from server.settings import SettingsError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def checkpoint(name: str) -> Path:
    """The folder that ``name`` stands for: a path, or a name such as ``Qwen/Qwen3-0.6B``.

    Names are looked up among what Hugging Face's tools have already downloaded; nothing is fetched
    here. Raises SettingsError that says how to get what is missing.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(name):
        raise SettingsError(f"{name}: there is no such folder")
    from huggingface_hub import snapshot_download  # takes a while: only who needs it waits
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        raise SettingsError(
            f"{name}: neither a folder nor downloaded; get it with: hf download {name}"
        ) from None
