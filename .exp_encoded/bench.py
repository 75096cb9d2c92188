"""Products of few rows with int4 weights by asynchronous copies (kernel.py) beside the direct Triton kernel.

compile I N: fill Triton's cache with the I-th of N parts. run: check and time (see the README beside it)."""
import ctypes, json, os, sys, time
from pathlib import Path
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import torch
from kernel import encoded_kernel, encoded_loop_kernel
from graphllm.compile.tune import _short_kernel, microseconds
from graphllm.config import Bucket
from graphllm.ir.op import CallSite
from graphllm.ir.registry import load_ops
from graphllm.machine import detect_target
from graphllm.ops.encoded_weights import decoded
from graphllm.ops.fused_linear.triton_fused_linear import normalized

BEGIN, LIMIT = float(os.environ.get("BEGIN", time.time())), float(os.environ.get("LIMIT", "60"))
EPS, SHARED_MEMORY, WRONG = 1e-5, 228 * 1024, 0.01
LAYERS = {"gate_up": (28672, 4096, "norm gate"), "down": (4096, 14336, "residual"), "qkv": (6144, 4096, "norm"), "o": (4096, 4096, "residual")}
# block_n, warps, ring (0: all), rows of x in shared memory, steps of x ahead, programs of the loop kernel (0: one a block), most registers (0: any),
# copies of whole 128 bytes
OF_4096 = [(16, 4, 0, 1, 0, 0, 0, 0), (16, 4, 0, 1, 0, 0, 0, 1), (16, 8, 0, 1, 0, 0, 0, 1), (16, 16, 0, 1, 0, 0, 0, 1), (16, 4, 0, 0, 1, 0, 0, 1), (16, 8, 0, 0, 2, 0, 0, 1), (32, 8, 0, 1, 0, 0, 0, 1)]
OF_4096_8 = [(16, 4, 0, 0, 1, 0, 0, 1), (16, 8, 0, 0, 1, 0, 0, 1), (16, 8, 0, 0, 2, 0, 0, 1), (16, 8, 0, 8, 0, 0, 0, 1), (16, 16, 0, 8, 0, 0, 64, 1), (32, 8, 0, 0, 2, 0, 0, 1)]
VARIANTS = {
    ("gate_up", 1): [(16, 4, 0, 1, 0, 0, 0, 0), (16, 4, 0, 1, 0, 0, 0, 1), (16, 4, 0, 0, 0, 0, 0, 1), (16, 4, 2, 1, 0, 0, 64, 1), (16, 4, 2, 0, 0, 0, 64, 1), (16, 8, 0, 1, 0, 0, 64, 1),
                     (32, 8, 0, 1, 0, 0, 0, 1), (16, 4, 2, 1, 0, 924, 72, 1), (16, 8, 0, 1, 0, 264, 0, 0), (16, 8, 0, 1, 0, 264, 0, 1), (16, 16, 0, 1, 0, 264, 64, 1)],
    ("down", 1): [(16, 8, 4, 1, 0, 0, 0, 0), (16, 8, 4, 1, 0, 0, 0, 1), (16, 16, 2, 1, 0, 0, 64, 1), (16, 8, 6, 0, 1, 0, 0, 1), (16, 4, 8, 1, 0, 0, 0, 1), (16, 8, 2, 1, 0, 0, 0, 1), (32, 8, 5, 1, 0, 0, 0, 1)],
    ("qkv", 1): [*OF_4096, (16, 8, 0, 1, 0, 132, 0, 1)], ("o", 1): OF_4096,
    ("gate_up", 8): [(16, 4, 0, 0, 0, 0, 0, 1), (16, 4, 0, 0, 1, 0, 0, 1), (16, 8, 0, 0, 1, 0, 0, 1), (32, 8, 0, 0, 1, 0, 0, 1), (16, 8, 0, 8, 0, 264, 0, 1), (16, 16, 0, 8, 0, 264, 64, 1), (32, 16, 0, 8, 0, 132, 0, 1)],
    ("down", 8): [(16, 8, 6, 0, 1, 0, 0, 1), (16, 8, 6, 0, 2, 0, 128, 1), (16, 4, 12, 0, 1, 0, 0, 1), (32, 8, 5, 0, 1, 0, 0, 1), (32, 16, 2, 0, 1, 0, 0, 1)],
    ("qkv", 8): [*OF_4096_8, (16, 16, 0, 8, 0, 132, 0, 1)], ("o", 8): OF_4096_8,
}
CASES = [(layer, T, normed) for T, normed in ((1, False), (1, True), (8, False), (4, False)) for layer in LAYERS if not normed or "norm" in LAYERS[layer][2]]
OPS, TARGET = load_ops(), detect_target("cuda")
OP = OPS["fused_linear"]; TILE = OP.impls["triton_tile"]


def make(layer, T, normed, copies, device):
    """Arguments of a case: for each copy of the weights."""
    N, K, extra = LAYERS[layer]
    def empty(*shape, dtype=torch.bfloat16): return torch.empty(shape, dtype=dtype, device=device)
    def randn(*shape): return empty(*shape) if device == "meta" else torch.randn(*shape, dtype=torch.bfloat16, device=device)
    def weights():
        if device == "meta": return empty(N, K // 4, dtype=torch.int16), empty(K // 128, N, dtype=torch.float16), empty(K // 128, N, dtype=torch.int16)
        return (torch.randint(-32768, 32768, (N, K // 4), device=device, dtype=torch.int16), (torch.rand(K // 128, N, device=device) * 0.01 + 0.01).half(),
                torch.randint(-8, 8, (K // 128, N), device=device, dtype=torch.int16))
    x = randn(T, K); norm = randn(K) if normed else None
    residual = randn(T, N) if "residual" in extra else None
    return [OP.bind((), dict(x_TI=x, weight_OI=w, scales_GO=s, zeros_GO=z, norm_I=norm, residual_TN=residual, gated="gate" in extra, form="int4", group=128, eps=EPS))
            for w, s, z in (weights() for _ in range(copies))]


def launch(a, v, within, warm=False):
    """The product of a case by a variant. within: the norm is in the kernel."""
    block_n, warps, ring, shared_rows, ahead, programs, registers, wide = v
    x, w = a["x_TI"], a["weight_OI"]; (T, K), N = x.shape, w.shape[0]
    steps = -(-K // (256 * warps))
    if a["norm_I"] is not None and not within: x = normalized(x, a["norm_I"], EPS)
    out = x.new_empty(T, N // 2 if a["gated"] else N)
    given = (x, w, a["scales_GO"], a["zeros_GO"], a["norm_I"] if within else x, x if a["residual_TN"] is None else a["residual_TN"], out, T)
    constants = dict(X_ROW=K, N=N, K=K, EPS=EPS, NORM=within, RESIDUAL=a["residual_TN"] is not None, GATED=a["gated"], BLOCK_N=block_n, WARPS=warps,
                     RING=min(ring or steps, steps), SHARED_ROWS=shared_rows, X_AHEAD=ahead, WIDE=wide, num_warps=warps, launch_pdl=True, **({"maxnreg": registers} if registers else {}))
    grid, kernel = (programs or N // block_n,), encoded_loop_kernel if programs else encoded_kernel
    if warm: return kernel.warmup(*given, grid=grid, **constants)
    launch.kernel = kernel[grid](*given, **constants)
    return out


def carve_out(kernel, percent):
    """Ask for so much of the L1 cache as shared memory, wherever the kernel runs (-1: as the driver likes)."""
    if ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(kernel.function), 9, percent): raise RuntimeError("no carve-out set")


def programs_that_fit(kernel, warps):
    return min(SHARED_MEMORY // (kernel.metadata.shared + 1024), 65536 // (-(-kernel.n_regs // 8) * 8 * 32 * warps), 64 // warps)


def kinds(layer, T, normed):
    """(variant, norm within) of our kernel, then launch constants of the direct one."""
    ours = [(v, within) for v in VARIANTS[layer, 1 if T == 1 else 8] for within in ((True,) if normed and v[3] == 1 else () if normed else (False,))]
    (a,) = make(layer, T, normed, 1, "meta")
    return ours, [c for c in TILE.configs(CallSite(a, TARGET, Bucket("decode", T, T))) if c["direct"]]


def compile_part(i, n):
    k = 0
    for layer, T, normed in CASES:
        if T == 4: continue  # the same kernels as of T = 8
        (a,) = make(layer, T, normed, 1, "meta")
        ours, direct = kinds(layer, T, normed)
        for job in [*((launch, (a, *o, True), {}) for o in ours), *((TILE.fn, (), {**a, **c}) for c in direct)]:
            k += 1
            if k % n != i: continue
            try: job[0](*job[1], **job[2])
            except Exception as e: print("compile", layer, T, job[1][1:] or {n: v for n, v in job[2].items() if isinstance(v, int)}, str(e)[-300:], flush=True)


def reference(a):
    """float64."""
    x = a["x_TI"].double()
    if a["norm_I"] is not None: x = x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * a["norm_I"].double()
    y = x @ decoded(a["weight_OI"], a["scales_GO"].double(), a["zeros_GO"], "int4", 128, x.shape[1]).T
    if a["gated"]: gate, value = y.chunk(2, 1); y = torch.nn.functional.silu(gate) * value
    return y if a["residual_TN"] is None else y + a["residual_TN"].double()


def again_without(label):
    """After an error that spoils the CUDA context: a new process, without what caused it."""
    os.environ.update(SKIP=os.environ.get("SKIP", "") + ";" + label, BEGIN=str(BEGIN), DONE=str(run.done))
    os.execv(sys.executable, [sys.executable, *sys.argv])


def attempt(label, call):
    """What a call finds, or None; its exception is printed."""
    if label in os.environ.get("SKIP", "").split(";") or time.time() - BEGIN > LIMIT: return None
    try: return call()
    except Exception as e:
        print(label, "FAILED", type(e).__name__, str(e)[:300].replace("\n", " "), flush=True)
        if any(s in str(e) for s in ("CUDA error", "illegal", "launch failure", "misaligned")): again_without(label)


def run():
    torch.manual_seed(0); found = []
    for run.done in range(int(os.environ.get("DONE", "0")), len(CASES)):
        layer, T, normed = CASES[run.done]; (N, K, _), name = LAYERS[layer], f"{layer} T={T}{' norm' if normed else ''}"
        if time.time() - BEGIN > LIMIT: print("no time left for", name, flush=True); continue
        copies = max(3, min(32, -(-256 * 2**20 // (N * K // 2))))
        calls = make(layer, T, normed, copies, "cuda"); want = reference(calls[0]); torch.cuda.synchronize()
        short = _short_kernel(T); alone = microseconds([short] * copies); floor = N * K * (0.5 + 4 / 128) / 4.27e6
        def timed(fn): return 2 * microseconds([f for a in calls for f in ((lambda a=a: fn(a)), short)]) - alone
        def measured(fn):
            got = fn(calls[0]); torch.cuda.synchronize()
            error = float((got.double() - want).norm() / want.norm())
            if not error < WRONG: raise ValueError(f"wrong: relative error {error:.4f}, first {got.flatten()[:4].tolist()} for {want.flatten()[:4].tolist()}")
            return timed(fn), error
        ours, direct = kinds(layer, T, normed); rows = []
        for c in direct:
            label = f"{name} direct {(c['block_n'], c['warps'], c['direct'], c['norm'])}"
            r = attempt(label, lambda: measured(lambda a: TILE.fn(**a, **c)))
            if r: rows.append((r[0], label, r[1]))
        rows.sort(); fastest = rows[0][0] if rows else 0
        print(f"{name}: floor {floor:.1f} ({N * K / 2 / 4.27e6:.1f} without scales), short kernel {alone:.2f}; direct (block_n, warps, ahead, norm): "
              + ", ".join(f"{us:.2f} {label.split('direct ')[1]} {e:.4f}" for us, label, e in rows[:4]), flush=True)
        for v, within in ours:
            label = f"{name} copies {v} {'within' if within else ''}"
            def one():
                us, error = measured(lambda a: launch(a, v, within)); k = launch.kernel
                carved = None
                try:
                    carve_out(k, 100); carved = timed(lambda a: launch(a, v, within))
                finally: carve_out(k, -1)
                return us, error, carved, k.n_regs, k.n_spills, k.metadata.shared, programs_that_fit(k, v[1])
            r = attempt(label, one)
            if not r: continue
            us, error, carved, regs, spills, shared, fit = r
            best = f"{us / fastest:.2f}" if fastest else "-"
            print(f"  {us:6.2f} {carved:6.2f} {best} {error:.4f} {v} {regs}/{spills} {shared} {fit}", flush=True)
            rows.append((min(us, carved), label, error))
        again = [r for r in rows if "direct" in r[1]][:1]
        for _, label, _ in again:
            c = next(c for c in direct if f"direct {(c['block_n'], c['warps'], c['direct'], c['norm'])}" in label)
            r = attempt(label, lambda: measured(lambda a: TILE.fn(**a, **c)))
            if r: print(f"  best direct again {r[0]:.2f}", flush=True)
        found.append({"case": name, "floor": floor, "rows": rows})
        del calls, want
    print(f"done in {time.time() - BEGIN:.0f} s", flush=True)
    if os.environ.get("OUT"): Path(os.environ["OUT"], f"encoded{os.environ.get('DONE', '')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    compile_part(*map(int, sys.argv[2:])) if sys.argv[1] == "compile" else run()
