"""Which wheel a launch carries to which machine, and one made of an installation."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.launch.wheel import ASKED, Wheels, given, repacked

OLD, NEW = "p2pavg-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "p2pavg-0.1.0-cp312-abi3-{}.whl"
X86, ARM = NEW.format("manylinux_2_27_x86_64.manylinux_2_28_x86_64"), NEW.format("manylinux_2_28_aarch64")
MAC, TWIN = NEW.format("macosx_11_0_arm64"), "p2pavg-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("told", "fits"),
    [
        ("3.11 linux x86_64", OLD),
        ("3.12 linux x86_64", X86),
        ("3.13 linux x86_64", X86),
        ("3.14 linux aarch64", ARM),
        ("3.11 linux aarch64", None),
        ("3.13 darwin arm64", MAC),
        ("3.13 darwin x86_64", None),
        ("3.10 linux x86_64", None),
    ],
)
def test_a_machine_gets_the_wheel_that_fits_its_python(told: str, fits: str | None) -> None:
    """By what that Python says of itself; the stable ABI fits all later ones."""
    found = Wheels([Path(name) for name in (OLD, X86, ARM, MAC)]).fitting(told)
    assert found == (None if fits is None else Path(fits))
    assert Wheels([Path(TWIN)]).fitting(told) == Path(TWIN)


def test_this_python_tells_what_is_asked() -> None:
    """Three words, as above."""
    told = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True).stdout
    assert told.split()[:2] == [f"3.{sys.version_info[1]}", sys.platform]
    assert len(told.split()) == 3


def test_a_folder_or_a_file_is_named(tmp_path: Path) -> None:
    """What is no wheel is one sentence."""
    with pytest.raises(ConfigurationError, match="no wheel of p2pavg in"):
        given(tmp_path)
    with pytest.raises(ConfigurationError, match="there is no wheel"):
        given(tmp_path / OLD)
    for name in (OLD, X86):
        (tmp_path / name).touch()
    assert {path.name for path in given(tmp_path).files} == {OLD, X86}
    assert [path.name for path in given(tmp_path / X86).files] == [X86]
    (tmp_path / "w.whl").touch()
    with pytest.raises(ConfigurationError, match="is no name of a wheel"):
        given(tmp_path / "w.whl")


def test_an_installation_is_packed_into_the_wheel_that_it_came_from(tmp_path: Path) -> None:
    """Installed by pip from a wheel, it becomes that wheel again: its name and its files."""
    made = tmp_path / "p2pavg-9.1-py3-none-any.whl"
    files = {
        "p2pavg/__init__.py": "x = 1\n",
        "p2pavg/part/data.txt": "text\n",
        "p2pavg-9.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: p2pavg\nVersion: 9.1\n",
        "p2pavg-9.1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "p2pavg-9.1.dist-info/entry_points.txt": "[console_scripts]\np2pavg = p2pavg:x\n",
    }
    record = "p2pavg-9.1.dist-info/RECORD"
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "there", made], check=True, capture_output=True)
    (installed,) = metadata.distributions(name="p2pavg", path=[str(tmp_path / "there")])
    again = repacked(installed, tmp_path / "there")
    assert again.name == made.name
    with zipfile.ZipFile(again) as archive:
        assert {name for name in archive.namelist() if "__pycache__" not in name} >= {*files, record}
        assert all(archive.read(name).decode() == text for name, text in files.items())
    subprocess.run([*pip, "--target", tmp_path / "again", again], check=True, capture_output=True)


def test_a_link_to_a_checkout_is_no_installation_of_a_wheel(tmp_path: Path) -> None:
    """An editable installation has no files of the package."""
    info = tmp_path / "p2pavg-9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: p2pavg\nVersion: 9.1\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
    (info / "RECORD").write_text("p2pavg.pth,,\n")
    (installed,) = metadata.distributions(name="p2pavg", path=[str(tmp_path)])
    with pytest.raises(ConfigurationError, match="start this command in a clone"):
        repacked(installed, tmp_path)
