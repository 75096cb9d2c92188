"""Runs the PTX of small configurations in numpy, all threads of a program in step, and compares with `decoded` in float64.

Asynchronous copies are done only where they are waited for, so that a wait for too few groups is found."""
import os, re, sys
sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import numpy as np, torch
from build import build
from graphllm.ops.encoded_weights import decoded, packed

U32 = np.uint64(0xFFFFFFFF)
def f32(bits): return bits.astype(np.uint32).view(np.float32)
def bits32(f): return np.asarray(f, np.float32).view(np.uint32).astype(np.uint64)
def bf(bits16): return (bits16.astype(np.uint32) << 16).view(np.float32)
def to_bf(f):
    u = np.asarray(f, np.float32).view(np.uint32).astype(np.uint64); return ((u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)) & np.uint64(0xFFFF)
def pair(bits, op, other):
    lo = to_bf(op(bf(bits & np.uint64(0xFFFF)), bf(other & np.uint64(0xFFFF)))); hi = to_bf(op(bf(bits >> np.uint64(16)), bf(other >> np.uint64(16))))
    return lo | (hi << np.uint64(16))
def signed(v, n): return v.astype(np.int64) if n == 64 else v.astype(np.uint32).astype(np.int32).astype(np.int64)
def trim(v, n): return v.astype(np.uint64) & np.uint64((1 << n) - 1)

class Machine:
    def __init__(self, ptx, threads, shared, params, buffers):
        self.n, self.shared, self.params, self.buffers = threads, np.full(shared + 4096, 0xAB, np.uint8), params, buffers
        body = ptx[ptx.index("\n{") + 2:ptx.index("\tret;")]
        self.lines, self.labels = [], {}
        size = self.shared.size; self.epoch = 1  # between barriers; who last wrote and read a byte, and when
        self.writer, self.written, self.reader, self.was_read = (np.zeros(size, np.int64) for _ in range(4))
        body = re.sub(r"//[^\n]*", "", body).replace("{ .reg", ".reg")
        body = re.sub(r"^\s*\.loc[^\n]*$", "", body, flags=re.M)
        body = re.sub(r"^\s*\$L__(tmp|func)[^\n]*$", "", body, flags=re.M)
        body = re.sub(r"^\s*(\$L__BB\w+):", r"label \1;", body, flags=re.M)
        for statement in body.split(";"):
            s = " ".join(statement.split())
            while s.startswith("}"): s = s[1:].strip()
            if s.startswith("label"): self.labels[s.split()[1]] = len(self.lines)
            elif s and not s.startswith("."): self.lines.append(s)
    def get(self, o):
        o = o.strip()
        if o.startswith("0f"): return np.full(self.n, int(o[2:], 16), np.uint64)
        if o == "%tid.x": return np.arange(self.n, dtype=np.uint64)
        if o == "%nctaid.x": return np.full(self.n, self.programs, np.uint64)
        if o == "%ctaid.x": return np.full(self.n, self.block, np.uint64)
        if o == "global_smem": return np.zeros(self.n, np.uint64)
        if re.match(r"-?(0x[0-9a-fA-F]+|\d+)$", o): return np.full(self.n, int(o, 0) & (2**64 - 1), np.uint64)
        return self.r[o]
    def put(self, name, v, active):
        v = np.broadcast_to(v, (self.n,)).astype(np.uint64); old = self.r.get(name)
        self.r[name] = v if active.all() else np.where(active, v, np.zeros(self.n, np.uint64) if old is None else old)
    def address(self, o):
        m = re.match(r"\[ ?([^\]\s+]+) ?(?:\+ ?(-?\d+))? ?\]", o); return self.get(m[1]) + np.uint64(int(m[2] or 0) & (2**64 - 1))
    def memory(self, space, at, size, active):
        if space == "shared":
            assert (at[active] + size <= self.shared.size).all() and not (at[active] % size).any(), "shared"; return self.shared, at
        for base, array in self.buffers:
            inside = (at >= base) & (at + np.uint64(size) <= base + np.uint64(array.size))
            if inside[active].all(): assert not (at[active] % size).any(), "alignment"; return array, at - np.uint64(base)
        raise IndexError("global address outside")
    def race(self, at, size, active, write):
        """Whether a thread touches what another one wrote, or writes what another one read or writes, since the last barrier."""
        for t in np.flatnonzero(active):
            b = slice(int(at[t]), int(at[t]) + size)
            assert not ((self.written[b] == self.epoch) & (self.writer[b] != t)).any(), ("race on a write", self.line)
            if write:
                assert not ((self.was_read[b] == self.epoch) & (self.reader[b] != t)).any(), ("race on a read", self.line)
                self.written[b], self.writer[b] = self.epoch, t
            else:
                many = (self.was_read[b] == self.epoch) & (self.reader[b] != t)
                self.reader[b], self.was_read[b] = np.where(many, -1, t), self.epoch
    def load(self, space, at, size, active):
        out = np.zeros((self.n, size), np.uint8)
        if active.any():
            m, at = self.memory(space, at, size, active)
            if space == "shared": self.race(at, size, active, False)
            out[active] = m[at[active][:, None].astype(np.int64) + np.arange(size)]
        return out
    def store(self, space, at, data, active):
        if active.any():
            m, at = self.memory(space, at, data.shape[1], active)
            if space == "shared": self.race(at, data.shape[1], active, True)
            m[at[active][:, None].astype(np.int64) + np.arange(data.shape[1])] = data[active]
    def run(self, block, programs=0):
        self.epoch += 1; self.block, self.programs, self.r, groups, group, pc = block, programs, {}, [], [], 0
        while pc < len(self.lines):
            line = self.lines[pc]; pc += 1
            active = np.ones(self.n, bool); s = line
            m = re.match(r"@(!?)(%p\d+) (.*)", s)
            if m: active = self.get(m[2]).astype(bool) ^ bool(m[1]); s = m[3]
            op, _, rest = s.partition(" "); p = op.split(".")
            args = [a.strip() for a in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
            names = [[n.strip() for n in a.strip("{}").split(",")] for a in args]
            self.line = line
            if p[0] == "bar": self.epoch += 1
            if p[0] in ("griddepcontrol", "bar", "ret"): continue
            if p[0] == "bra":
                assert active.all() or not active.any()
                if active.all(): pc = self.labels[rest.strip()]
                continue
            if op == "cp.async.commit_group": groups.append(group); group = []
            elif op == "cp.async.wait_group":
                while len(groups) > int(rest):
                    for f in groups.pop(0): f()
            elif op.startswith("cp.async"):
                to, of = self.address(args[0]), self.address(args[1]); count = self.get(args[3])
                assert (count[active] == 16).all() or (count[~active] == 0).all() or True
                def copy(to=to, of=of, active=active, count=count):
                    data = self.load("global", of, 16, active & (count == 16)); self.store("shared", to, data, active)
                self.race(to, 16, active, True); group.append(copy)
            elif op.startswith("ld.param"): self.put(args[0], np.full(self.n, self.params[int(re.search(r"param_(\d+)", args[1])[1])], np.uint64), active)
            elif p[0] == "ld":
                v = len(names[0]); size = int(p[-1][1:]) // 8; data = self.load(p[1], self.address(args[1]), v * size, active)
                for i, name in enumerate(names[0]):
                    part = np.zeros((self.n, 8), np.uint8); part[:, :size] = data[:, i * size:(i + 1) * size]; self.put(name, part.view(np.uint64)[:, 0], active)
            elif p[0] == "st":
                size = int(p[-1][1:]) // 8; data = np.concatenate([np.ascontiguousarray(self.get(n)).view(np.uint8).reshape(self.n, 8)[:, :size] for n in names[1]], 1)
                self.store(p[1], self.address(args[0]), data, active)
            elif op.startswith("ldmatrix"):
                count = int(re.search(r"\.x(\d)", op)[1]); at = self.address(args[1]).reshape(-1, 32); trans = "trans" in op
                for i, name in enumerate(names[0]):
                    out = np.zeros(self.n, np.uint64).reshape(-1, 32)
                    for w in range(self.n // 32):
                        for row in at[w, 8 * i:8 * i + 8]: self.race(np.full(self.n, row), 16, np.arange(self.n) == 32 * w, False)
                        rows = self.shared[at[w, 8 * i:8 * i + 8][:, None].astype(np.int64) + np.arange(16)].view(np.uint16); rows = rows.T if trans else rows
                        out[w] = (rows[:, 0::2].astype(np.uint64) | (rows[:, 1::2].astype(np.uint64) << np.uint64(16))).reshape(32)
                    self.put(name, out.reshape(-1), active)
            elif op.startswith("mma"):
                d, a, b, c = ([self.get(n).reshape(-1, 32) for n in x] if i else x for i, x in enumerate(names)); new = [np.zeros((self.n // 32, 32), np.float32) for _ in d]
                half = lambda v, i: bf(((v >> np.uint64(16 * i)) & np.uint64(0xFFFF)))
                for w in range(self.n // 32):
                    A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
                    for lane in range(32):
                        g, t = divmod(lane, 4)
                        for e in range(2):
                            for i in range(4): A[g + 8 * (i % 2), 2 * t + e + 8 * (i // 2)] = half(a[i][w, lane:lane + 1], e)[0]
                            for i in range(2): B[2 * t + e + 8 * i, g] = half(b[i][w, lane:lane + 1], e)[0]
                            for i in range(2): C[g + 8 * i, 2 * t + e] = f32(c[2 * i + e][w, lane:lane + 1])[0]
                    C = C + A @ B
                    for lane in range(32):
                        g, t = divmod(lane, 4)
                        for i in range(4): new[i][w, lane] = C[g + 8 * (i // 2), 2 * t + i % 2]
                for name, v in zip(d, new): self.put(name, bits32(v.reshape(-1)), active)
            elif op == "mov.b32" and len(names[0]) == 2:
                v = self.get(args[1]); self.put(names[0][0], v & np.uint64(0xFFFF), active); self.put(names[0][1], v >> np.uint64(16), active)
            elif op == "mov.b32" and len(names[1]) == 2: self.put(args[0], self.get(names[1][0]) | (self.get(names[1][1]) << np.uint64(16)), active)
            elif p[0] == "shfl":
                v = self.get(args[1]).reshape(-1, 32); self.put(args[0], v[:, np.arange(32) ^ int(args[2])].reshape(-1), active)
            else: self.put(args[0], self.value(op, p, [self.get(a) for a in args[1:]]), active)
    def value(self, op, p, a):
        kind = p[-1]; n = int(re.sub(r"\D", "", kind) or 32) if kind[0] in "busf" and kind[1:].isdigit() else 32
        if p[0] == "mov": return trim(a[0], n)
        if p[0] == "cvt":
            to, of = p[-2:]
            if to == "f32" and of == "bf16": return bits32(bf(a[0]))
            if to == "f32" and of == "f16": return bits32(a[0].astype(np.uint16).view(np.float16).astype(np.float32))
            if to == "bf16" and of == "f32": return to_bf(f32(a[0]))
            if to[0] in "us" and of[0] in "us": return trim(signed(trim(a[0], int(of[1:])), int(of[1:])) if of[0] == "s" else trim(a[0], int(of[1:])), int(to[1:]))
            raise NotImplementedError(op)
        if kind == "bf16x2": return pair(a[0], {"sub": np.subtract, "mul": np.multiply, "add": np.add}[p[0]], a[1])
        if kind in ("f32", "ftz") or op.endswith("f32"):
            x = [f32(v) for v in a]
            with np.errstate(all="ignore"):
                if p[0] == "fma": return bits32(x[0].astype(np.float64) * x[1] + x[2])
                if p[0] == "setp": raise NotImplementedError(op)
                return bits32({"add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1], "div": lambda: x[0] / x[1], "neg": lambda: -x[0], "rsqrt": lambda: 1 / np.sqrt(x[0]),
                               "ex2": lambda: np.exp2(x[0]), "max": lambda: np.maximum(*x)}[p[0]]())
        if p[0] == "lop3":
            x, y, z, t = (int(v[0]) if i == 3 else v for i, v in enumerate(a)); out = np.zeros(self.n, np.uint64)
            for i in range(8):
                if t >> i & 1: out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
            return out & U32
        if p[0] == "setp":
            k = int(kind[1:]); x, y = (signed(trim(v, k), k) if kind[0] == "s" else trim(v, k) for v in a)
            return {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}[p[1]]
        if p[0] == "selp": return np.where(a[2].astype(bool), trim(a[0], n), trim(a[1], n))
        if p[0] in ("and", "or", "xor"): return trim({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[p[0]](a[0], a[1]), 1 if kind == "pred" else n)
        if p[0] == "not": return trim(~a[0], 1 if kind == "pred" else n)
        if p[0] == "shl": return trim(trim(a[0], n) << a[1], n)
        if p[0] == "shr": return trim((signed(trim(a[0], n), n) >> a[1].astype(np.int64)) if kind[0] == "s" else trim(a[0], n) >> a[1], n)
        if p[0] == "bfe": return (a[0] >> a[1]) & ((np.uint64(1) << a[2]) - np.uint64(1))
        if p[0] == "add": return trim(a[0] + a[1], n)
        if p[0] in ("min", "max"): return trim({"min": np.minimum, "max": np.maximum}[p[0]](*(signed(v, n) if kind[0] == "s" else trim(v, n).astype(np.int64) for v in a)).astype(np.uint64), n)
        if p[0] == "neg": return trim(np.zeros(self.n, np.uint64) - a[0], n)
        if p[0] == "sub": return trim(a[0] - a[1], n)
        if p[0] in ("mul", "mad"):
            if p[1] == "wide": x, y = (signed(v, n) if kind[0] == "s" else trim(v, n).astype(np.int64) for v in a[:2]); out = (x * y).astype(np.uint64); return out + a[2] if p[0] == "mad" else out
            out = a[0] * a[1]; return trim(out + a[2] if p[0] == "mad" else out, n)
        raise NotImplementedError(op)

def check(T, N, K, gated, residual, norm, block_n, warps, ring, rows, ahead, programs=0, wide=0):
    steps = -(-K // (256 * warps)); g = torch.Generator().manual_seed(T * K + N)
    rand = lambda *s: torch.randn(*s, generator=g).bfloat16()
    codes = torch.randint(0, 16, (N, K), generator=g); words = packed(codes, "int4", 128)
    scales = (torch.rand(K // 128, N, generator=g) * 0.01 + 0.01).half(); zeros = torch.randint(-8, 9, (K // 128, N), generator=g).to(torch.int16)
    x, weight, res = rand(T, K), rand(K), rand(T, N)
    width = N // 2 if gated else N
    out = np.full(T * width * 2, 0xFF, np.uint8)
    tensors = [t.contiguous().view(torch.uint8).numpy().reshape(-1) for t in (x, words, scales, zeros, weight, res)] + [out]
    bases = [(i + 1) << 32 for i in range(7)]
    constants = dict(X_ROW=K, N=N, K=K, EPS=1e-5, NORM=norm, RESIDUAL=residual, GATED=gated, BLOCK_N=block_n, WARPS=warps, RING=min(ring or steps, steps), SHARED_ROWS=rows, X_AHEAD=ahead, WIDE=wide)
    k = build(loop=programs > 0, **constants, **({"T": 1} if T == 1 else {}))
    params = [*bases, *([] if T == 1 else [T]), 0, 0]
    machine = Machine(k.asm["ptx"], 32 * warps, k.metadata.shared, params, [(np.uint64(b), t) for b, t in zip(bases, tensors)])
    for block in range(programs or N // block_n): machine.run(block, programs)
    got = torch.from_numpy(out.view(np.int16).copy()).view(torch.bfloat16).double().reshape(T, width)
    a = x.double()
    if norm: a = a * torch.rsqrt((a * a).mean(1, keepdim=True) + 1e-5) * weight.double()
    y = a @ decoded(words, scales.double(), zeros, "int4", 128, K).T
    if gated: gate, value = y.chunk(2, 1); y = torch.nn.functional.silu(gate) * value
    if residual: y = y + res[:, :width].double() if not gated else y
    error = float((got - y).norm() / y.norm())
    print("T", T, "programs", programs, constants, "error", round(error, 5), flush=True)
    assert error < 0.006, (got[0, :8], y[0, :8])

if __name__ == "__main__":
    check(1, 32, 2048, False, True, False, 16, 4, 0, 1, 0)
    check(1, 64, 2048, True, False, True, 16, 4, 0, 1, 0)
    check(4, 32, 3072, False, True, False, 16, 4, 2, 0, 1)
    check(8, 32, 2048, True, False, False, 16, 4, 1, 8, 0)
    check(8, 64, 2048, True, False, False, 32, 4, 0, 0, 2)
    check(1, 64, 4096, True, False, True, 32, 8, 1, 1, 0)
    check(1, 32, 6144, False, False, True, 16, 8, 2, 1, 0)
    check(3, 32, 2048, False, True, False, 16, 8, 0, 0, 0)
    check(1, 96, 2048, True, False, True, 16, 4, 0, 1, 0, 2)
    check(1, 80, 4096, False, True, False, 16, 4, 2, 1, 0, 3)
    check(5, 128, 4096, True, False, False, 16, 8, 0, 8, 0, 3)
    check(1, 32, 3584, False, True, True, 16, 8, 0, 1, 0)
    check(8, 32, 3584, False, True, False, 16, 4, 2, 0, 1)
    check(4, 32, 2560, True, False, False, 16, 4, 2, 8, 0)
    check(1, 32, 4096, True, False, True, 16, 16, 0, 1, 0)
    check(1, 32, 2048, False, True, True, 16, 4, 1, 1, 0, 0, 1)
    check(4, 64, 4096, True, False, False, 32, 8, 0, 0, 1, 0, 1)
    check(1, 96, 4096, True, False, False, 16, 4, 2, 1, 0, 2, 1)
    check(8, 64, 4096, True, False, False, 16, 16, 0, 8, 0, 3, 1)
