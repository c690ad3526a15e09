#!/usr/bin/env bash
# Installs what wheels are built with, in an image of manylinux: libdeflate, liburing, libzstd, xxhash,
# nvcc.
#
# cibuildwheel runs it once in each image (pyproject.toml). The libraries are static and
# position-independent, so that the modules contain them. Sources are pinned by commit.
set -euo pipefail
prefix=${PREFIX:-/usr/local}
cuda=${CUDA_FOLDER:-/opt/cuda}
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT

# Checks out one commit. Arguments: repository, commit.
checkout() {
  local folder=$sources/${1##*/}
  git init -q "$folder"
  git -C "$folder" fetch -q --depth 1 "$1" "$2"
  git -C "$folder" checkout -q FETCH_HEAD
}

checkout https://github.com/ebiggers/libdeflate c8c56a20f8f621e6a966b716b31f1dedab6a41e3 # v1.25
cmake -S "$sources/libdeflate" -B "$sources/libdeflate/build" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_INSTALL_PREFIX="$prefix" \
  -DLIBDEFLATE_BUILD_SHARED_LIB=OFF -DLIBDEFLATE_BUILD_GZIP=OFF
cmake --build "$sources/libdeflate/build" --target install

checkout https://github.com/axboe/liburing e3d35ea59d3ba09075ed4d7751e4bb9049cce64a # 2.14
cd "$sources/liburing"
./configure --prefix="$prefix"
make -C src ENABLE_SHARED=0 CFLAGS="-O2 -fPIC" install
cd - >/dev/null

checkout https://github.com/facebook/zstd f8745da6ff1ad1e7bab384bd1f9d742439278e99 # v1.5.7
make -C "$sources/zstd/lib" install-static install-includes PREFIX="$prefix" \
  CFLAGS="-O2 -fPIC" ZSTD_LEGACY_SUPPORT=0

checkout https://github.com/Cyan4973/xxHash bbb27a5efb85b92a0486cf361a8635715a53f6ba # v0.8.2
install -D -m 644 "$sources/xxHash/xxhash.h" "$prefix/include/xxhash.h"

# The compiler and the static runtime of CUDA. Importing the wheel needs neither, nor a driver.
python3 -m pip install -q --target "$cuda" --no-deps nvidia-cuda-nvcc==13.0.88 \
  nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 \
  nvidia-cuda-cccl==13.0.85
ln -sf libcudart.so.13 "$cuda/nvidia/cu13/lib/libcudart.so"
ln -sfn lib "$cuda/nvidia/cu13/lib64"
# nvcc finds its headers beside the path by which it is called, so a link would not do.
printf '#!/bin/sh\nexec %s "$@"\n' "$cuda/nvidia/cu13/bin/nvcc" >"$prefix/bin/nvcc"
chmod +x "$prefix/bin/nvcc"
