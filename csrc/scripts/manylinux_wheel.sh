#!/bin/sh
# manylinux_wheel.sh SOURCE OUT ARCHITECTURE...: a wheel for x86_64 or aarch64 that needs glibc 2.27.
#
# GCC of this machine compiles, with the headers and libraries of an older distribution, whose packages
# are listed beside with their hashes. libstdc++ and libgcc are linked in. Needs auditwheel, curl,
# dpkg-deb, and for another architecture its compiler (g++-aarch64-linux-gnu); run it in an
# environment that has setuptools.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$1 out=$2
shift 2
mkdir -p "$out"
out=$(cd "$out" && pwd)

fetch() { # ARCHITECTURE FOLDER: unpack the packages of it there, unless they are
    test -e "$2/ready" && return
    rm -rf "$2" && mkdir -p "$2/packages"
    while read -r of hash url; do
        [ "$of" = "$1" ] || continue
        package=$2/packages/${url##*/}
        curl --fail --silent --show-error --location --retry 3 -o "$package" "$url"
        echo "$hash  $package" | sha256sum --check --quiet
        dpkg-deb -x "$package" "$2"
    done < "$here/manylinux_packages.txt"
    rm -rf "$2"/packages "$2"/usr/lib/gcc*/*/8/include* # those of the compiler in use are needed
    touch "$2/ready"
}

compiler() { # FILE COMMAND...: an executable that runs the command with more arguments
    file=$1
    shift
    printf '#!/bin/sh\nexec %s "$@"\n' "$*" > "$file"
    chmod +x "$file"
}

for architecture; do
    build=$out/build-$architecture root=$out/root-$architecture
    fetch "$architecture" "$root"
    target=$architecture-linux-gnu prefix=''
    if [ "$architecture" = x86_64 ]; then
        gcc=$root/usr/lib/gcc/$target/8 libraries=$root/usr/lib/$target flags=''
        headers="-isystem $root/usr/include/c++/8 -isystem $root/usr/include/$target/c++/8" c_headers=''
    else # GCC 8 had no functions for atomics outside of the code
        gcc=$root/usr/lib/gcc-cross/$target/8 libraries=$root/usr/$target/lib flags=-mno-outline-atomics
        c_headers="-isystem $root/usr/$target/include"
        headers="-isystem $root/usr/$target/include/c++/8 -isystem $root/usr/$target/include/c++/8/$target"
    fi
    [ "$(uname -m)" = "$architecture" ] || prefix=$target-
    flags="--sysroot=$root -B $gcc -B $libraries -L$gcc -L$libraries -L$root/lib/$target -static-libgcc $flags"
    command -v "${prefix}g++" > /dev/null || { echo "no ${prefix}g++: apt install g++-$target" >&2; exit 1; }
    rm -rf "$build" && cp -r "$source" "$build"
    compiler "$build/cc" "${prefix}gcc" "$flags" "$c_headers"
    compiler "$build/c++" "${prefix}g++" "$flags" -static-libstdc++ -nostdinc++ "$headers" "$c_headers"
    (
        cd "$build"
        export CC="$build/cc" CXX="$build/c++" LDSHARED="$build/cc -shared" LDCXXSHARED="$build/c++ -shared"
        export _PYTHON_HOST_PLATFORM="linux-$architecture"
        python setup.py --quiet bdist_wheel --dist-dir "$build/wheel" > "$build/build.log" 2>&1 ||
            { cat "$build/build.log" >&2; exit 1; }
    )
    auditwheel repair -w "$out" "$build"/wheel/*.whl
done
