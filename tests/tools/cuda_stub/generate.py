"""Write generic.cpp and cuda.c: empty functions for the symbols that torch's libraries need.

usage: generate.py TORCH_LIB_DIR OUT_DIR
"""

import re
import subprocess
import sys
from pathlib import Path

lib, out = Path(sys.argv[1]), Path(sys.argv[2])
here = Path(__file__).parent


def lines(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def undefined(*names):
    found = [line for name in names for line in lines("nm", "-D", "--undefined-only", lib / name)]
    return {line.split()[-1].split("@")[0] for line in found if line.strip()}


written = (here / "stub.cpp").read_text()
needed = undefined(*(path.name for path in lib.glob("lib*.so*")))
of_runtime = re.compile(r"(__cuda|cuda[A-Z]|cublas|nccl[A-Z])")
runtime = [
    n for n in sorted(filter(of_runtime.match, needed)) if not re.search(rf"\b{n}\(", written)
]
export = '#define X extern "C" __attribute__((visibility("default")))\n'
functions = "\n".join(f"X long {n}(...){{return 0;}}" for n in runtime)
(out / "generic.cpp").write_text(f"{export}{functions}\n")

driver = {n for n in undefined("libcaffe2_nvrtc.so") if re.match(r"cu[A-Z]", n)}
of_driver = re.compile(r"cu(?!FFT|BLAS|DNN|DSS|SPARSE|SOLVER|File)[A-Z][A-Za-z0-9]+(_v[0-9])?")
for name in ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so"):
    driver |= set(filter(of_driver.fullmatch, lines("strings", "-n", "4", lib / name)))
# Functions that Triton calls, so that the code of model.compile is built and launched.
for path in (lib.parents[1] / "triton/backends/nvidia").glob("driver.*"):
    driver |= set(re.findall(r"\bcu[A-Z]\w+\b", path.read_text()))
special = """
#include <stdlib.h>
#define X __attribute__((visibility("default")))
extern unsigned stub_touched();
extern int cudaGetDevice(int*d);
X int cuInit(unsigned f){return 0;}
X int cuDriverGetVersion(int*v){*v=13000;return 0;}
X int cuDeviceGetCount(int*n){*n=getenv("STUB_GPUS")?atoi(getenv("STUB_GPUS")):1;return 0;}
X int cuDevicePrimaryCtxGetState(int d,unsigned*f,int*a){*f=0;*a=(stub_touched()>>d)&1;return 0;}
X int cuCtxGetCurrent(void**c){*c=(void*)1;return 0;}
X int cuCtxGetDevice(int*d){return cudaGetDevice(d);}
X int cuStreamIsCapturing(void*s,int*status){*status=0;return 0;}
X int cuGetErrorString(int e,const char**s){*s="stub";return 0;}
X int cuPointerGetAttribute(void*v,int a,unsigned long p){*(unsigned long*)v=p;return 0;}
X int cuFuncGetAttribute(int*v,int a,void*f){*v=a==0?1024:0;return 0;}
X int cuDeviceGetAttribute(int*v,int a,int d){
  *v=a==10?32:a==16?132:a==12||a==82?65536:a==8||a==97?232448:a==75?9:0;return 0;}
"""
functions = "\n".join(
    f"X long {n}(){{return 0;}}" for n in sorted(driver) if f"{n}(" not in special
)
(out / "cuda.c").write_text(f"{special}{functions}\n")
print(f"{len(runtime)} functions of the runtime, {len(driver)} of the driver")
