"""The compiled attention is used only where it can be built and was checked to be exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.bundled import SPRIG_FOLDER
from runtime.embedded.model import native as building
from runtime.embedded.model import selfcheck
from runtime.embedded.model.attention import NativeAttention
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.native import NotBuilt, native
from runtime.embedded.model.selfcheck import choose_kernel
from tests.runtime.kernels import KERNELS

CONFIG = ModelConfig.from_checkpoint(SPRIG_FOLDER / "policy")
built = pytest.mark.skipif("native" not in KERNELS, reason="no C compiler")


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every test an empty build cache, and reset the once-only warnings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.cache_clear()
    selfcheck._warn_once.cache_clear()
    yield
    native.cache_clear()
    selfcheck._warn_once.cache_clear()


@built
def test_it_is_built_once(tmp_path: Path) -> None:
    """The library is built once; its file is named like the library and used again."""
    library = native()
    (path,) = (tmp_path / "hedgerow").iterdir()
    assert path.stem == library.name
    mtime = path.stat().st_mtime_ns
    native.cache_clear()
    assert native().name == library.name
    assert path.stat().st_mtime_ns == mtime


@built
def test_another_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source may change bits, so it gives another name in the fingerprint."""
    name, source = native().name, tmp_path / "other.c"
    source.write_text(building.SOURCE.read_text() + "/* another */")
    monkeypatch.setattr(building, "SOURCE", source)
    native.cache_clear()
    assert native().name != name


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"])
def test_without_a_compiler_torch_attends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    """Without a compiler ``auto`` uses torch with one warning, and ``native`` raises NotBuilt."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert choose_kernel("auto", CONFIG, (1,)) is None
        assert choose_kernel("auto", CONFIG, (1,)) is None
    (record,) = caplog.records
    assert "attention by torch" in record.message
    assert "no C compiler" in record.message
    with pytest.raises(NotBuilt, match=r"kernel: 'native'; no C compiler"):
        choose_kernel("native", CONFIG, (1,))


@built
def test_a_source_that_is_not_taken_is_told_with_what_the_compiler_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error holds the compiler's message, and no file is left behind."""
    source = tmp_path / "broken.c"
    source.write_text('#error "not here"')
    monkeypatch.setattr(building, "SOURCE", source)
    with pytest.raises(NotBuilt, match="not here"):
        native()
    assert list((tmp_path / "hedgerow").iterdir()) == []


@built
def test_a_compiler_without_openmp_builds_it_for_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler without OpenMP, like Apple's, gives the same functions under another name."""
    name = native().name
    monkeypatch.setattr(building, "THREADED", "-fno-such-flag")
    native.cache_clear()
    assert native().name != name
    assert choose_kernel("native", CONFIG, (1, 2)) is native()


@built
def test_where_there_is_no_home_it_is_built_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache folder the library is built in a temporary one."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native().name.startswith("rows-")


def test_torch_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernel "torch" nothing is built."""
    monkeypatch.setattr(selfcheck, "native", lambda: pytest.fail("built all the same"))
    assert choose_kernel("torch", CONFIG, (1,)) is None


@pytest.mark.parametrize("size", [8, 272])
def test_heads_that_it_cannot_read_are_left_to_torch(size: int) -> None:
    """Head sizes other than multiples of 16 up to 256 use torch; ``native`` raises NotBuilt."""
    assert choose_kernel("auto", replace(CONFIG, head_dim=size), (1,)) is None
    with pytest.raises(NotBuilt, match=f"heads of {size} numbers; multiples of 16 up to 256"):
        choose_kernel("native", replace(CONFIG, head_dim=size), (1,))


@pytest.mark.slow
@built
@pytest.mark.parametrize("size", [16, 48, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 40])
def test_heads_of_many_sizes_are_read(size: int, window: int | None) -> None:
    """The start-up check of values and bits passes for these head sizes and windows."""
    config = replace(CONFIG, head_dim=size, heads=6, kv_heads=2, sliding_window=window)
    assert choose_kernel("native", config, (1, 2)) is native()


@pytest.mark.promise(
    "The engine refuses a compiled attention kernel that has wrong values, or bits that depend on "
    "other rows."
)
@built
def test_what_computes_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with small errors, or with bits that depend on other rows, is refused."""
    right = NativeAttention.run

    def off(by: Callable[[int], float]) -> Callable[..., None]:
        def run(self: NativeAttention, *tensors: torch.Tensor) -> None:
            right(self, *tensors)
            tensors[-1][0] += by(len(tensors[-1]))

        return run

    monkeypatch.setattr(NativeAttention, "run", off(lambda rows: 1e-3))
    with pytest.raises(NotBuilt, match="from a plain softmax"):
        choose_kernel("native", CONFIG, (1,))
    monkeypatch.setattr(NativeAttention, "run", off(lambda rows: 1e-7 * rows))
    with pytest.raises(NotBuilt, match="depend on the others, with 1 threads"):
        choose_kernel("native", CONFIG, (1,))
