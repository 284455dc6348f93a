#!/usr/bin/env bash
# Runs a command on GPUs that compute nothing. usage: STUB_GPUS=2 run.sh ENV python train.py trainer=gpu ...
# STUB_GPUS: devices (1).  STUB_GIB: memory of each (80).  STUB_NAME: their name (NVIDIA H100 80GB HBM3).
env=$(cd "$1" && pwd); shift
export STUB_NCCL_DIR=${STUB_NCCL_DIR:-/dev/shm/nstub}
rm -rf "$STUB_NCCL_DIR"
export LD_PRELOAD=$env/stub/libstubcuda.so LD_LIBRARY_PATH=$env/stub STUB_AFTER=$env/stub/object_collectives.py
export PYTHONPATH=$PWD/src:$env/stub/site:$PWD OMP_NUM_THREADS=1 PATH=$env/bin:$PATH
exec "$@"
