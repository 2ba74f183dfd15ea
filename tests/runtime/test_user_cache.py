"""The folder of compiled functions: the user's own, or a temporary one."""

import os
from pathlib import Path

import pytest

from runtime import user_cache as module
from runtime.user_cache import user_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is looked for; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._temporary_folder.cache_clear()
    return tmp_path / "hedgerow"


def test_it_is_made_for_the_user_alone(folder: Path) -> None:
    """The folder is made with no rights for others, and found again."""
    assert user_cache() == user_cache() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "group"), [(0o702, 0), (0o770, 1)])
def test_a_folder_that_others_can_write_to_is_not_used(
    folder: Path,
    mode: int,
    group: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lies there is executed; a temporary folder takes its place, with one warning."""
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(os, "getgid", lambda: folder.stat().st_gid + group)
    assert user_cache() == user_cache() != folder
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("mode", [0o755, 0o2770])
def test_a_folder_of_the_user_and_group_is_used(
    folder: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may read it; the user's own group may write, as on a volume with ``fsGroup``."""
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(os, "getgid", lambda: folder.stat().st_gid)
    assert user_cache() == folder
