"""Builds configurations for sm_90 without a GPU: registers, spills, shared memory, instructions."""
import os, subprocess, sys, tempfile, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from kernel import encoded_kernel, encoded_loop_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
BIN = "/work/t36/triton/backends/nvidia/bin/"
TYPES = dict(x_ptr="*bf16", weight_ptr="*i16", scales_ptr="*fp16", zeros_ptr="*i16", norm_ptr="*bf16", residual_ptr="*bf16", out_ptr="*bf16", T="i32")
names = encoded_kernel.arg_names
LAYERS = {"qkv": (6144, 4096, "norm"), "o": (4096, 4096, "residual"), "gate_up": (28672, 4096, "norm gate"), "down": (4096, 14336, "residual")}

def build(maxnreg=None, loop=False, **c):
    sig = {n: "constexpr" if n in c else TYPES[n] for n in names}
    src = GluonASTSource(encoded_loop_kernel if loop else encoded_kernel, sig, constexprs={(names.index(n),): v for n, v in c.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")})
    options = {"num_warps": c["WARPS"], **({"maxnreg": maxnreg} if maxnreg else {})}
    return compile(src, target=GPUTarget("cuda", 90, 32), options=options)

def constants(layer, block_n, warps, ring, shared_rows, ahead, norm, wide=0):
    N, K, extra = LAYERS[layer]
    steps = -(-K // (256 * warps))
    return dict(X_ROW=K, N=N, K=K, EPS=1e-5, NORM=norm, RESIDUAL="residual" in extra, GATED="gate" in extra, BLOCK_N=block_n, WARPS=warps,
                RING=min(ring or steps, steps), SHARED_ROWS=shared_rows, X_AHEAD=ahead, WIDE=wide)

def report(k, *label):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        out = subprocess.run([BIN + "cuobjdump", "-res-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([BIN + "nvdisasm", f.name], capture_output=True, text=True).stdout
    words = out.split()
    regs = int([w for w in words if w.startswith("REG:")][0][4:])
    shared = k.metadata.shared
    warps = k.metadata.num_warps
    fit = min(233472 // (shared + 1024), 65536 // (regs * 32 * warps), 64 // warps)
    print(*label, "registers", regs, "shared", shared, "programs", fit, {n: sass.count(n) for n in
          ("LDGSTS", "LDG", "LDS.128", "LDS.U16", "LDS", "STS", "SHFL", "HMMA", "LDL", "BAR.SYNC", "LOP3", "SHF", "HADD2", "HFMA2", "PRMT")},
          "instructions", sum(1 for l in sass.split("\n") if l.strip().startswith("/*")), flush=True)
    return sass

if __name__ == "__main__":
    begin = time.time()
    which = sys.argv[1:] or ["o 16 4 0 1 0"]
    for w in which:
        layer, *rest = w.split()
        n, warps, ring, rows, ahead = map(int, rest[:5])
        k = build(loop="loop" in rest, **constants(layer, n, warps, ring, rows, ahead, "norm" in rest, "wide" in rest))
        open("/tmp/enc.ptx", "w").write(k.asm["ptx"]); open("/tmp/enc.ttgir", "w").write(k.asm["ttgir"])
        open("/tmp/enc.sass", "w").write(report(k, w))
    print(round(time.time() - begin, 1), "s")
