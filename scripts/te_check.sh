#!/usr/bin/env bash
# Builds the real Transformer Engine beside .venv, on a machine that needs no GPU, and checks our layers
# against its classes: names, shapes, checkpoints both ways. Its kernels are not run. The build takes some
# ten minutes on two cores, once; a C++ compiler is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=2.20.2
PACKAGES=$(echo .venv/lib/python3*/site-packages)
if ! [ -f .venv-te/built-$VERSION ]; then
  rm -rf .venv-te
  .venv/bin/python -m uv venv --quiet --python .venv/bin/python .venv-te
  # Everything else comes from .venv, which stays as it is.
  echo "$PWD/$PACKAGES" > "$(echo .venv-te/lib/python3*/site-packages)/product.pth"
  INSTALL=".venv/bin/python -m uv pip install --quiet --python .venv-te --no-deps"
  $INSTALL ninja pybind11 wheel setuptools einops onnx onnxscript onnx_ir ml_dtypes pydantic pydantic_core \
    annotated_types typing_inspection nvdlfw-inspect nvidia-cudnn-frontend "nvidia-cuda-crt==13.0.*" "nvidia-cuda-cccl==13.0.*"
  $INSTALL "transformer-engine-cu13==$VERSION" "transformer-engine==$VERSION"
  NVIDIA=$PWD/$PACKAGES/nvidia
  export CPATH=$(echo "$PWD"/.venv-te/lib/python3*/site-packages/nvidia/cu13/include):$NVIDIA/cu13/include:$NVIDIA/cudnn/include:$NVIDIA/nccl/include
  export LIBRARY_PATH=$NVIDIA/cu13/lib:$NVIDIA/cudnn/lib CUDA_HOME=$NVIDIA/cu13
  PATH=$PWD/.venv-te/bin:$PATH MAX_JOBS=${MAX_JOBS:-$(nproc)} \
    $INSTALL --no-build-isolation "transformer-engine-torch==$VERSION"
  touch .venv-te/built-$VERSION
fi
# Transformer Engine looks for libraries beside itself, or here.
export CUDA_HOME=$PWD/$PACKAGES/nvidia/cu13 CUDNN_HOME=$PWD/$PACKAGES/nvidia/cudnn
export LD_LIBRARY_PATH=$CUDA_HOME/lib:$CUDNN_HOME/lib:$PWD/$PACKAGES/nvidia/nccl/lib
exec .venv-te/bin/python -m pytest -q -p no:cacheprovider tests/te/ "$@"
