"""Environments with chosen versions of what drumline stands on, as users get them.

    python -m tests.versions.environments [--python PYTHON] [--newest] FOLDER [NAME==VERSION...]

What is not named comes in the newest version that pyproject.toml allows, with --newest in the
newest of all, previews too. Of PyPI's torch, a build for CUDA, the libraries of CUDA are left out,
gigabytes, which it does not call without a GPU (tests/programs/cuda_stand_ins.py). uv installs,
from `make uv`: it shares files between environments, and heeds no settings of pip, such as a
constraint for all.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = ROOT / "build" / "tools" / "bin" / "uv"
EXTRAS = ("models", "serve", "test")
OF_CUDA = re.compile("Requires-Dist: (nvidia-|cuda-|triton)")
"""The lines of torch's metadata for what is left out."""


def build(
    folder: Path, python: str = sys.executable, chosen: Iterable[str] = (), newest: bool = False
) -> Path:
    """The interpreter of the environment, which is made unless it is there already, complete."""
    found = folder / "bin" / "python"
    ready = folder / "ready"
    wanted = "\n".join([python, *chosen, f"{newest=}", *requirements()])
    if not (ready.exists() and ready.read_text() == wanted):
        run(UV, "venv", "--quiet", "--clear", "--seed", "--python", interpreter(python), folder)
        _fill(found, {_name(text): text for text in chosen}, newest)
        ready.write_text(wanted)
    return found


def interpreter(python: str) -> str:
    """A path as it is; of a version such as 3.12, a Python that is installed, by pyenv too."""
    if not re.fullmatch(r"\d+\.\d+", python):
        return python
    for found in (f"python{python}", *Path.home().glob(f".pyenv/versions/{python}.*/bin/python")):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([found, "-c", ""], check=True, stderr=subprocess.DEVNULL)
            return str(found)
    raise SystemExit(f"Python {python} is not installed here: install it, as with pyenv.")


def requirements() -> list[str]:
    """All that the tests need, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = project["optional-dependencies"]
    return [*project["dependencies"], *(text for extra in EXTRAS for text in of_extras[extra])]


def _fill(python: Path, chosen: dict[str, str], newest: bool) -> None:
    needed = {_name(text): text for text in requirements()}
    needed = {
        name: re.sub(r",?<[\w.]+", "", text) if newest else text for name, text in needed.items()
    }
    needed |= chosen
    pre = ["--prerelease", "allow"] if newest else []
    install(python, *pre, "--no-deps", needed["torch"])
    leave_out_cuda(python)
    install(python, *pre, *(text for name, text in needed.items() if name != "drumline"))
    _add_drumline(python)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _add_drumline(python: Path) -> None:
    """This tree with its native parts, which serve every Python, as .venv has built them."""
    (_packages(python) / "drumline.pth").write_text(f"{ROOT}\n")
    script = python.parent / "drumline"
    script.write_text(f"#!{python}\nfrom drumline.cli import main\n\nraise SystemExit(main())\n")
    script.chmod(0o755)


def _packages(python: Path) -> Path:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-c", ask).strip())


def install(python: Path, *arguments: object) -> None:
    run(UV, "pip", "install", "--quiet", "--no-config", "--python", python, *arguments)


def run(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def leave_out_cuda(python: Path) -> None:
    """Stand-ins for libraries of CUDA, unless torch was built without it."""
    packages = _packages(python)
    version = (packages / "torch" / "version.py").read_text()
    if release := re.search(r"^cuda.*= '([\d.]+)'", version, re.MULTILINE):
        real = ("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc")
        install(python, "--no-deps", *(f"{name}=={release[1]}.*" for name in real))
        run(python, ROOT / "tests" / "programs" / "cuda_stand_ins.py", python)
        (metadata,) = packages.glob("torch-*.dist-info/METADATA")
        lines = metadata.read_text().splitlines(keepends=True)
        metadata.unlink()  # other environments share it
        metadata.write_text("".join(line for line in lines if not OF_CUDA.match(line)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("chosen", nargs="*", metavar="NAME==VERSION")
    parser.add_argument("--python", default=sys.executable, help="a path, or a version")
    parser.add_argument("--newest", action="store_true", help="of all, previews too")
    options = parser.parse_args()
    build(options.folder, options.python, options.chosen, options.newest)


if __name__ == "__main__":
    main()
