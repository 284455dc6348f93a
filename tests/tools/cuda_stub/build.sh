#!/usr/bin/env bash
# Makes an environment with PyPI's CUDA build of torch and the stub in it (several GB, minutes).
# usage, from the project's root: [TORCH=2.13.0] tests/tools/cuda_stub/build.sh ENV
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
env=$1
python -m pip install -q uv
[ -x "$env/bin/python" ] || python -m uv venv -q "$env"
pinned=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' .ci/constraints.txt)
install=(python -m uv pip install -q --python "$env/bin/python")
torch="torch==${TORCH:-$pinned}"
# --no-config: PyPI's own build of torch, not a CPU build that pip may be configured to take
"${install[@]}" --no-config "$torch"
# Each version of torch has its own requirements, which are not the pinned ones.
of_torch='torch==|triton==|setuptools==|cuda-|nvidia-'
"${install[@]}" -e '.[dev]' "$torch" -c <(grep -vE "^($of_torch)" .ci/constraints.txt)
"$env/bin/python" -c 'import torch; assert torch.version.cuda, "no CUDA build: " + torch.__version__'
lib=$("$env/bin/python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent / "lib")')
# The headers of the runtime are those of this torch. They include headers (crt/) of the compiler,
# which Triton has, of some other version of CUDA.
runtime=$(dirname "$(find "$env" -path '*/nvidia/*/include/cuda_runtime_api.h')")
compiler=$(find "$env" -path '*backends/nvidia/include' -type d)
mkdir -p "$env/stub"
"$env/bin/python" "$here/generate.py" "$lib" "$env/stub"
g++ -O1 -shared -fPIC -w -I"$runtime" -I"$compiler" "$here/stub.cpp" "$env/stub/generic.cpp" \
    -o "$env/stub/libstubcuda.so"
gcc -shared -fPIC -w -o "$env/stub/libcuda.so.1" "$env/stub/cuda.c"
cp -r "$here/object_collectives.py" "$here/site" "$env/stub/"
echo "done: $env"
