"""Empty libraries in place of those of CUDA, gigabytes, that PyPI's torch is linked to.

    python cuda_stand_ins.py PYTHON

Without a GPU torch calls none of their functions, which trap here. It does call the runtime and
CUPTI, which are small and real: pip install --no-deps nvidia-cuda-runtime nvidia-cuda-cupti.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

FUNCTION = re.compile(
    r" U ((?:cublas|cudnn|cufft|cuFile|curand|cusparse|nccl|nvshmem)\w+)(?:@(\S+))?"
)
LIBRARY = re.compile(r"\[(lib(?:cublas|cudnn|cufft|cufile|curand|cusparse|nccl|nvshmem)\S*)\]")


def said(*command: object) -> str:
    return subprocess.run(map(str, command), stdout=subprocess.PIPE, text=True, check=True).stdout


def main(python: str) -> None:
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = Path(said(python, "-c", where).strip(), "torch", "lib")
    of_torch = sorted(folder.glob("lib*torch*.so"))
    functions = defaultdict(set)
    for name, version in FUNCTION.findall(said("nm", "-D", "--undefined-only", *of_torch)):
        functions[version].add(name)
    source, versions = folder / "stand_in.c", folder / "stand_in.map"
    names = sorted(set().union(*functions.values()))
    source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
    versions.write_text(
        "".join(f"{v} {{ {'; '.join(sorted(functions[v]))}; }};\n" for v in functions if v)
    )
    stand_in = folder / "libstand_in.so"
    script = f"-Wl,--version-script,{versions}"
    said("cc", "-w", "-shared", "-fPIC", source, "-o", stand_in, script)
    for library in set(LIBRARY.findall(said("readelf", "-d", *of_torch))):
        (folder / library).unlink(missing_ok=True)
        (folder / library).symlink_to(stand_in.name)


if __name__ == "__main__":
    main(sys.argv[1])
