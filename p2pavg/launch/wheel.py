"""The wheels of p2pavg that a launch carries to other machines."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import p2pavg
from p2pavg.errors import ConfigurationError, P2PAvgError

BUILD_S = 600.0
OLDEST = (3, 11)  # Python that p2pavg runs on
ASKED = (
    "import sys, platform; print('%d.%d %s %s' % (sys.version_info[:2] + (sys.platform, platform.machine())))"
)
"""What a machine's Python prints of itself, for `fitting`; Python 2 prints it, too."""
_NAME = re.compile(r"p2pavg-[^-]+(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")


@dataclass(frozen=True, slots=True)
class Wheels:
    """Wheels of one version, for one or several kinds of machines."""

    files: Sequence[Path]

    def fitting(self, told: str) -> Path | None:
        """The one for a machine whose Python told this of itself (see `ASKED`); None: there is none."""
        version, system, machine = told.split()
        minor = int(version.partition(".")[2])
        return next((path for path in self.files if _fits(path.name, minor, system, machine)), None)


def too_old(told: str) -> bool:
    """Whether p2pavg does not run on the Python that told this of itself."""
    return tuple(map(int, told.split()[0].split("."))) < OLDEST


def _fits(name: str, minor: int, system: str, machine: str) -> bool:
    tags = _NAME.fullmatch(name)
    if tags is None:
        return False
    platforms = tags["platform"].split(".")
    if "any" not in platforms:
        word = {"darwin": "macosx"}.get(system, "linux")
        if not any(word in one and one.endswith((f"_{machine}", "_universal2")) for one in platforms):
            return False
    if tags["python"] == "py3":
        return True
    least = int(tags["python"].removeprefix("cp3"))
    return minor >= least if tags["abi"] == "abi3" else minor == least


def given(path: Path) -> Wheels:
    """A wheel, or those of a folder, the newest first. Raises ConfigurationError."""
    if path.is_dir():
        found = sorted(path.glob("p2pavg-*.whl"), key=lambda wheel: wheel.stat().st_mtime, reverse=True)
        if not found:
            raise ConfigurationError(f"there is no wheel of p2pavg in {path}; 'make wheel' makes some")
        return Wheels(found)
    if not path.is_file():
        raise ConfigurationError(f"there is no wheel {path}")
    if not _NAME.fullmatch(path.name):
        raise ConfigurationError(
            f"{path.name} is no name of a wheel of p2pavg: pip reads it to see where it fits"
        )
    return Wheels([path])


def made(folder: Path) -> Wheels:
    """Make a wheel in `folder`: built of the clone that this package runs from, or that is the current
    directory; elsewhere packed of the files of this installation.
    Raises ConfigurationError where there is neither, P2PAvgError when the build fails.
    """
    roots = (Path(p2pavg.__file__).resolve().parents[1], Path.cwd())
    root = next((root for root in roots if (root / "csrc" / "pump").is_dir()), None)
    if root is None:
        try:
            return Wheels([repacked(metadata.distribution("p2pavg"), folder)])
        except OSError as error:
            raise P2PAvgError(f"the wheel cannot be built ({error})") from None
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--wheel-dir", str(folder), str(root)],
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise P2PAvgError(f"the wheel was not built in {BUILD_S:.0f} s") from None
    wheels = sorted(folder.glob("p2pavg-*.whl"), key=lambda path: path.stat().st_mtime)
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise P2PAvgError(f"the wheel cannot be built ({last}); 'pip wheel --no-deps {root}' says more")
    return Wheels([wheels[-1]])


def repacked(installed: metadata.Distribution, folder: Path) -> Path:
    """The wheel from which p2pavg was installed, packed again of the files that lie here.
    Raises ConfigurationError where this installation is no wheel's.
    """
    files = [
        file for file in installed.files or () if ".." not in file.parts and "__pycache__" not in file.parts
    ]
    described = installed.read_text("WHEEL")
    if described is None or not any(file.name == "__init__.py" for file in files):
        raise ConfigurationError(
            "there are no sources of p2pavg here: start this command in a clone, or name a wheel with wheel="
        )
    path = folder / f"p2pavg-{installed.version}-{_tags(described.splitlines())}.whl"
    left_out = {"INSTALLER", "REQUESTED", "direct_url.json"}  # pip wrote these of this installation
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            if file.name not in left_out:
                archive.write(str(file.locate()), file.as_posix())
    return path


def _tags(lines: Iterable[str]) -> str:
    """Python, ABI and platform as a file's name says them: each a set, joined by dots."""
    tags = [line.partition(":")[2].strip().split("-") for line in lines if line.startswith("Tag:")]
    return "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
