#!/usr/bin/env bash
# On a machine with a GPU: builds the package with GPU kernels, tests it there, then measures it.
#
#   benchmarks/gpu.sh [KERNELS [benchmark arguments]]
#
# KERNELS is a folder that `python -m jax_fa.aot --output KERNELS` filled, on this machine or on
# another; without it the kernels are compiled here, which needs nvidia-cutlass-dsl. Build tools and
# jax are taken from the present environment, nothing is downloaded.
set -euo pipefail
case ${1:-} in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac
cd "$(dirname "$0")/.."
kernels=${1:-auto}
[ "$kernels" = auto ] || kernels=$(realpath "$kernels")
shift || true

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$site" . \
  --config-settings=gpu="$kernels"
export PYTHONPATH=$site:$PWD/tests:$PWD${PYTHONPATH:+:$PYTHONPATH}
JAX_PLATFORMS=cuda,cpu python3 -m pytest -q -p no:cacheprovider tests/gpu
python3 -m benchmarks.launch
python3 -m benchmarks.gpu "$@"
