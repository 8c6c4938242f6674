#!/bin/sh
# import_under_emulator.sh WHEEL...: load the native parts of those for another processor than this one.
#
# By qemu, with a Debian of that processor, unpacked and not started, as its Python. Needs mmdebstrap and
# qemu-user-static; without them it says what was not tried.
set -eu
for wheel; do
    architecture=$(echo "$wheel" | sed -E "s/.*(x86_64|aarch64)\.whl/\1/")
    [ "$architecture" = "$(uname -m)" ] && continue
    echo "== importing ${wheel##*/} under an emulator"
    if ! { command -v "qemu-$architecture-static" && command -v mmdebstrap; } > /dev/null; then
        echo "NOT tried: apt install mmdebstrap qemu-user-static" >&2
        continue
    fi
    root=build/release/debian-$architecture site=build/release/site-$architecture
    debian=$(echo "$architecture" | sed 's/aarch64/arm64/; s/x86_64/amd64/')
    test -e "$root" || mmdebstrap --quiet --variant=extract --architectures="$debian" --include=python3 \
        bookworm "$root" http://deb.debian.org/debian
    rm -rf "$site" && python3 -m zipfile -e "$wheel" "$site"
    "qemu-$architecture-static" -L "$root" "$root"/usr/bin/python3 -c '
import ctypes, pathlib, platform, sys
parts = [ctypes.PyDLL(path) for path in pathlib.Path(sys.argv[1]).rglob("*.abi3.so")]
print(f"loaded its {len(parts)} native parts on {platform.machine()}")' "$site"
done
