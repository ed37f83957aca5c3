"""Where Prometheus comes from, and what is left of an attempt that failed. No network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import install_prometheus
from tools.install_prometheus import InstallError, install, installed


class FakeDebian:
    """Does to folders what apt-get and dpkg-deb do. `empty`: the system's lists of packages are."""

    def __init__(self, *, empty: bool = False, broken: bool = False) -> None:
        self.empty = empty
        self.broken = broken
        self.commands: list[str] = []

    def run(self, command: Sequence[str], folder: Path) -> None:
        said = " ".join(part for part in command if not part.startswith("-o"))
        self.commands.append(said)
        own_lists = any(part.startswith("-oDir::State=") for part in command)
        match said.split()[:2]:
            case ["apt-get", "download"]:
                if self.empty and not own_lists:
                    raise InstallError("E: Unable to locate package prometheus")
                (folder / "prometheus_2_amd64.deb").write_text("")
            case ["dpkg-deb", "-x"]:
                if self.broken:
                    raise InstallError("dpkg-deb: error")
                (folder / command[3] / "usr" / "bin").mkdir(parents=True)
                (folder / command[3] / "usr" / "bin" / "prometheus").write_text("")
            case ["apt-get", "update"]:
                assert (folder / "state" / "lists" / "partial").is_dir()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(install_prometheus, "can_be_had", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    return tmp_path / "prometheus"


@pytest.mark.parametrize("empty", [False, True])
def test_the_package_is_unpacked(folder: Path, monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    debian = FakeDebian(empty=empty)
    monkeypatch.setattr(install_prometheus, "run", debian.run)
    assert installed(folder) is None
    program = install(folder)
    assert program == installed(folder) == folder / "usr" / "bin" / "prometheus"
    assert ("apt-get update" in debian.commands) is empty
    assert [path.name for path in folder.parent.iterdir()] == ["prometheus"]
    assert [path.name for path in folder.iterdir()] == ["usr"]


def test_what_failed_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_prometheus, "run", FakeDebian(broken=True).run)
    with pytest.raises(InstallError, match="dpkg-deb: error"):
        install(folder)
    assert not list(folder.parent.iterdir())


def test_the_systems_own_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert installed(folder) == Path("/usr/bin/prometheus")


def test_a_system_without_debian_packages_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_prometheus, "can_be_had", lambda: False)
    with pytest.raises(InstallError, match=r"no apt-get.*will be skipped"):
        install(folder)
    assert not list(folder.parent.iterdir())
