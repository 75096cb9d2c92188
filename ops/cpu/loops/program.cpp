// Runs loop programs: element-wise work, sums over a row, gathers, of any piece of a model without code of its own.
//
// A program goes over the rows of a space of some dimensions. For each row it runs instructions over registers, each of
// which holds the row's whole inner dimension or one number; `graphllm.compile.codegen.loops` writes programs.
#include "cpu/calls.h"
#include "cpu/loops/codes.h"
#include "cpu/loops/dtypes.h"
#include "cpu/loops/functions.h"
#include "cpu/threads.h"

namespace graphllm {
namespace {

constexpr i64 kMostDimensions = 6, kMostTensors = 64, kMostRegisters = 256;
constexpr i64 kEnough = 1 << 15;  // instructions times elements that are worth a parallel region

// The words of a program, one after another. A size is a constant, or one of the kernel's arguments.
class Words {
 public:
  Words(const i64* next, const Argument* arguments) : next_(next), arguments_(arguments) {}
  i64 word() { return *next_++; }
  i64 size() {
    const i64 word = *next_++;
    return word & 1 ? word >> 1 : arguments_[word >> 1].i64;
  }
  const i64* here() const { return next_; }

 private:
  const i64* next_;
  const Argument* arguments_;
};

struct Tensor {
  char* memory;
  i64 dtype, inner, strides[kMostDimensions];
};

// count: 1, or `kRow` for the inner dimension.
struct Register {
  void* data;
  i64 count;
};

struct Instruction {
  i64 code, dst, a, b, c;
};

struct Program {
  i64 dimensions, sizes[kMostDimensions], inner, block, rows, blocks;
  i64 tensors, registers, constants, instructions, bytes;
  Tensor tensor[kMostTensors];
  const i64 *layout, *constant;
  const Instruction* instruction;
};

Program read(const i64* words, const Argument* arguments) {
  Program p;
  Words w(words, arguments);
  p.dimensions = w.word();
  p.rows = 1;
  for (i64 d = 0; d < p.dimensions; d++) p.rows *= p.sizes[d] = w.size();
  p.inner = w.size();
  p.block = std::max<i64>(1, std::min(p.inner, w.word()));
  p.blocks = ceil_div(p.inner, p.block);
  p.tensors = w.word();
  for (i64 t = 0; t < p.tensors; t++) {
    Tensor& tensor = p.tensor[t];
    tensor.memory = static_cast<char*>(arguments[w.word()].ptr);
    tensor.dtype = w.word();
    tensor.memory += w.size() * kBytes[tensor.dtype];
    for (i64 d = 0; d < p.dimensions; d++) tensor.strides[d] = w.size();
    tensor.inner = w.size();
  }
  p.registers = w.word();
  p.bytes = w.word();  // of scalars; then of each place of the inner dimension
  p.bytes += w.word() * ((p.block + 15) / 16 * 16);
  p.layout = w.here();  // for each register: whether it is whole, its bytes by place, its first byte
  w = Words(p.layout + 3 * p.registers, arguments);
  p.constants = w.word();
  p.constant = w.here();  // register and bits
  w = Words(p.constant + 2 * p.constants, arguments);
  p.instructions = w.word();
  p.instruction = reinterpret_cast<const Instruction*>(w.here());
  return p;
}

// One thread's registers, and where it is.
class Machine {
 public:
  Machine(const Program& program, const Argument* arguments, char* memory) : p_(program), arguments_(arguments) {
    const i64 places = (p_.block + 15) / 16 * 16;
    for (i64 r = 0; r < p_.registers; r++) {
      const i64 *layout = p_.layout + 3 * r, scalar = layout[1], vector = layout[2];
      whole_[r] = layout[0];
      at_[r].data = memory + scalar + vector * places;
      at_[r].count = 1;
    }
    for (i64 c = 0; c < p_.constants; c++) std::memcpy(at_[p_.constant[2 * c]].data, p_.constant + 2 * c + 1, 8);
  }

  void run(i64 row, i64 block) {
    first_ = block * p_.block;
    const i64 count = std::min(p_.block, p_.inner - first_);
    if (count != count_) {
      count_ = count;
      for (i64 r = 0; r < p_.registers; r++) at_[r].count = whole_[r] ? count : 1;
    }
    for (i64 d = p_.dimensions - 1; d >= 0; d--) {
      place_[d] = row % p_.sizes[d];
      row /= p_.sizes[d];
    }
    for (i64 i = 0; i < p_.instructions; i++) step(p_.instruction[i]);
  }

 private:
  float* floats(i64 r) { return static_cast<float*>(at_[r].data); }
  i64* integers(i64 r) { return static_cast<i64*>(at_[r].data); }

  char* row_of(const Tensor& t) {
    i64 offset = first_ * t.inner;
    for (i64 d = 0; d < p_.dimensions; d++) offset += place_[d] * t.strides[d];
    return t.memory + offset * kBytes[t.dtype];
  }

  template <typename Out, typename In, typename Work>
  void one(const Instruction& i, Work&& work) {
    Out* __restrict__ out = static_cast<Out*>(at_[i.dst].data);
    const In* a = static_cast<const In*>(at_[i.a].data);
    const i64 count = at_[i.dst].count;
    if (at_[i.a].count == 1)
      for (i64 k = 0, n = count; k < n; k++) out[k] = work(a[0]);
    else
      for (i64 k = 0; k < count; k++) out[k] = work(a[k]);
  }

  template <typename Out, typename In, typename Work>
  void two(const Instruction& i, Work&& work) {
    Out* __restrict__ out = static_cast<Out*>(at_[i.dst].data);
    const In *a = static_cast<const In*>(at_[i.a].data), *b = static_cast<const In*>(at_[i.b].data);
    const i64 count = at_[i.dst].count;
    const bool one_a = at_[i.a].count == 1, one_b = at_[i.b].count == 1;
    if (count == 1)
      out[0] = work(a[0], b[0]);
    else if (one_a)
      for (i64 k = 0; k < count; k++) out[k] = work(a[0], one_b ? b[0] : b[k]);
    else if (one_b)
      for (i64 k = 0; k < count; k++) out[k] = work(a[k], b[0]);
    else
      for (i64 k = 0; k < count; k++) out[k] = work(a[k], b[k]);
  }

  template <typename T>
  void choose(const Instruction& i) {
    T* out = static_cast<T*>(at_[i.dst].data);
    const i64* which = integers(i.a);
    const T *b = static_cast<const T*>(at_[i.b].data), *c = static_cast<const T*>(at_[i.c].data);
    const i64 count = at_[i.dst].count, w = at_[i.a].count > 1, x = at_[i.b].count > 1, y = at_[i.c].count > 1;
    for (i64 k = 0; k < count; k++) out[k] = which[k * w] ? b[k * x] : c[k * y];
  }

  // `kParts` partial results, so that compilers need not reorder sums themselves.
  template <typename T, typename Work>
  T fold(i64 r, T start, Work&& work) {
    constexpr i64 kParts = 32;
    const T* a = static_cast<const T*>(at_[r].data);
    const i64 count = p_.inner;
    if (at_[r].count == 1 && count > 1) {  // the same number at every place
      T all = start;
      for (i64 k = 0; k < count; k++) all = work(all, a[0]);
      return all;
    }
    T parts[kParts];
    for (i64 k = 0; k < kParts; k++) parts[k] = start;
    i64 k = 0;
    for (; k + kParts <= count; k += kParts)
      for (i64 j = 0; j < kParts; j++) parts[j] = work(parts[j], a[k + j]);
    for (i64 j = 0; k < count; k++, j++) parts[j] = work(parts[j], a[k]);
    for (i64 half = kParts / 2; half; half /= 2)
      for (i64 j = 0; j < half; j++) parts[j] = work(parts[j], parts[j + half]);
    return parts[0];
  }

  void load(const Instruction& i) {
    const Tensor& t = p_.tensor[i.a];
    const i64 count = at_[i.dst].count;
    char* from = row_of(t);
    if (t.dtype <= kFloat16) {
      if (t.dtype == kFloat32 && (t.inner == 1 || count == 1))
        at_[i.dst].data = from;
      else
        with_floats(t.dtype, from, [&](auto* x) {
          convert(x, t.inner, floats(i.dst), 1, count, [](auto v) { return to_float(v); });
        });
    } else {
      with_integers(t.dtype, from, [&](auto* x) {
        convert(x, t.inner, integers(i.dst), 1, count, [](auto v) { return i64(v); });
      });
    }
  }

  void gather(const Instruction& i) {
    const Tensor& t = p_.tensor[i.a];
    const i64 count = at_[i.dst].count, *offsets = integers(i.b);
    char* from = row_of(t);
    if (at_[i.b].count == 1) {  // one row, wherever it lies
      from += offsets[0] * kBytes[t.dtype];
      if (t.dtype <= kFloat16)
        with_floats(t.dtype, from, [&](auto* x) {
          convert(x, t.inner, floats(i.dst), 1, count, [](auto v) { return to_float(v); });
        });
      else
        with_integers(t.dtype, from, [&](auto* x) {
          convert(x, t.inner, integers(i.dst), 1, count, [](auto v) { return i64(v); });
        });
    } else if (t.dtype <= kFloat16) {
      with_floats(t.dtype, from, [&](auto* x) {
        for (i64 k = 0; k < count; k++) floats(i.dst)[k] = to_float(x[k * t.inner + offsets[k]]);
      });
    } else {
      with_integers(t.dtype, from, [&](auto* x) {
        for (i64 k = 0; k < count; k++) integers(i.dst)[k] = i64(x[k * t.inner + offsets[k]]);
      });
    }
  }

  // offsets: of each element, or of the row (1), or none.
  void put(const Tensor& t, i64 r, const i64* offsets, i64 apart) {
    const i64 count = t.inner ? count_ : 1, step = at_[r].count > 1;
    char* to = row_of(t);
    if (t.dtype <= kFloat16)
      with_floats(t.dtype, to, [&](auto* x) {
        const float* from = floats(r);
        if (!offsets && step)
          convert(from, 1, x, t.inner, count, [](float v) {
            std::decay_t<decltype(*x)> out;
            graphllm::store(&out, v);
            return out;
          });
        else
          for (i64 k = 0; k < count; k++)
            graphllm::store(x + k * t.inner + (offsets ? offsets[k * apart] : 0), from[k * step]);
      });
    else
      with_integers(t.dtype, to, [&](auto* x) {
        const i64* from = integers(r);
        for (i64 k = 0; k < count; k++)
          x[k * t.inner + (offsets ? offsets[k * apart] : 0)] = std::decay_t<decltype(*x)>(from[k * step]);
      });
  }

  void step(const Instruction& i) {
    switch (Code(i.code)) {
      case kLoad: return load(i);
      case kGather: return gather(i);
      case kStore: return put(p_.tensor[i.dst], i.a, nullptr, 0);
      case kScatter: return put(p_.tensor[i.dst], i.a, integers(i.b), at_[i.b].count > 1);
      case kBind: at_[i.dst].data = row_of(p_.tensor[i.a]); return;
      case kPlace:
        for (i64 k = 0; k < at_[i.dst].count; k++) integers(i.dst)[k] = first_ + k;
        return;
      case kRow: integers(i.dst)[0] = place_[i.a]; return;
      case kSize: integers(i.dst)[0] = i.a & 1 ? i.a >> 1 : arguments_[i.a >> 1].i64; return;
      case kFloat: return one<float, i64>(i, [](i64 x) { return float(x); });
      case kInt: return one<i64, float>(i, [](float x) { return i64(x); });
      case kBool: return one<i64, float>(i, [](float x) { return i64(x != 0); });
      case kRoundBf16: return one<float, float>(i, [](float x) { return to_float(to_bf16(x)); });
      case kRoundF16: return one<float, float>(i, [](float x) { return to_float(to_half(x)); });
      case kAdd: return two<float, float>(i, [](float x, float y) { return x + y; });
      case kSub: return two<float, float>(i, [](float x, float y) { return x - y; });
      case kMul: return two<float, float>(i, [](float x, float y) { return x * y; });
      case kDiv: return two<float, float>(i, [](float x, float y) { return x / y; });
      case kMax: return two<float, float>(i, [](float x, float y) { return x > y || x != x ? x : y; });
      case kMin: return two<float, float>(i, [](float x, float y) { return x < y || x != x ? x : y; });
      case kPow: return two<float, float>(i, [](float x, float y) { return std::pow(x, y); });
      case kMod:
        return two<float, float>(i, [](float x, float y) {
          const float rest = std::fmod(x, y);
          return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
        });
      case kNeg: return one<float, float>(i, [](float x) { return -x; });
      case kAbs: return one<float, float>(i, [](float x) { return std::fabs(x); });
      case kExp: return one<float, float>(i, [](float x) { return exp_of(x); });
      case kExp2: return one<float, float>(i, [](float x) { return exp2_of(x); });
      case kExpm1: return one<float, float>(i, [](float x) { return expm1_of(x); });
      case kLog: return one<float, float>(i, [](float x) { return log_of(x); });
      case kLog1p: return one<float, float>(i, [](float x) { return log1p_of(x); });
      case kSqrt: return one<float, float>(i, [](float x) { return std::sqrt(x); });
      case kRsqrt: return one<float, float>(i, [](float x) { return 1.f / std::sqrt(x); });
      case kReciprocal: return one<float, float>(i, [](float x) { return 1.f / x; });
      case kSin: return one<float, float>(i, [](float x) { return turn_of(x, 0); });
      case kCos: return one<float, float>(i, [](float x) { return turn_of(x, 1); });
      case kTanh: return one<float, float>(i, [](float x) { return tanh_of(x); });
      case kSigmoid: return one<float, float>(i, [](float x) { return sigmoid_of(x); });
      case kErf: return one<float, float>(i, [](float x) { return erf_of(x); });
      case kFloor: return one<float, float>(i, [](float x) { return std::floor(x); });
      case kCeil: return one<float, float>(i, [](float x) { return std::ceil(x); });
      case kRound: return one<float, float>(i, [](float x) { return std::nearbyint(x); });
      case kTrunc: return one<float, float>(i, [](float x) { return std::trunc(x); });
      case kChoose: return choose<float>(i);
      case kLt: return two<i64, float>(i, [](float x, float y) { return i64(x < y); });
      case kLe: return two<i64, float>(i, [](float x, float y) { return i64(x <= y); });
      case kEq: return two<i64, float>(i, [](float x, float y) { return i64(x == y); });
      case kNe: return two<i64, float>(i, [](float x, float y) { return i64(x != y); });
      case kIsNan: return one<i64, float>(i, [](float x) { return i64(x != x); });
      case kSum: floats(i.dst)[0] = fold(i.a, 0.f, [](float x, float y) { return x + y; }); return;
      case kMean: floats(i.dst)[0] = fold(i.a, 0.f, [](float x, float y) { return x + y; }) / float(p_.inner); return;
      case kLargest:
        floats(i.dst)[0] = fold(i.a, -INFINITY, [](float x, float y) { return x > y || x != x ? x : y; });
        return;
      case kSmallest:
        floats(i.dst)[0] = fold(i.a, INFINITY, [](float x, float y) { return x < y || x != x ? x : y; });
        return;
      case kIntAdd: return two<i64, i64>(i, [](i64 x, i64 y) { return x + y; });
      case kIntSub: return two<i64, i64>(i, [](i64 x, i64 y) { return x - y; });
      case kIntMul: return two<i64, i64>(i, [](i64 x, i64 y) { return x * y; });
      case kIntDiv: return two<i64, i64>(i, [](i64 x, i64 y) { return y ? x / y - (x % y != 0 && (x < 0) != (y < 0)) : 0; });
      case kIntMod: return two<i64, i64>(i, [](i64 x, i64 y) { return y ? (x % y + y) % y : 0; });
      case kIntMax: return two<i64, i64>(i, [](i64 x, i64 y) { return x > y ? x : y; });
      case kIntMin: return two<i64, i64>(i, [](i64 x, i64 y) { return x < y ? x : y; });
      case kIntNeg: return one<i64, i64>(i, [](i64 x) { return -x; });
      case kIntAbs: return one<i64, i64>(i, [](i64 x) { return x < 0 ? -x : x; });
      case kIntAnd: return two<i64, i64>(i, [](i64 x, i64 y) { return x & y; });
      case kIntOr: return two<i64, i64>(i, [](i64 x, i64 y) { return x | y; });
      case kIntXor: return two<i64, i64>(i, [](i64 x, i64 y) { return x ^ y; });
      case kIntNot: return one<i64, i64>(i, [](i64 x) { return i64(!x); });
      case kIntShiftLeft: return two<i64, i64>(i, [](i64 x, i64 y) { return x << y; });
      case kIntShiftRight: return two<i64, i64>(i, [](i64 x, i64 y) { return x >> y; });
      case kIntChoose: return choose<i64>(i);
      case kIntLt: return two<i64, i64>(i, [](i64 x, i64 y) { return i64(x < y); });
      case kIntLe: return two<i64, i64>(i, [](i64 x, i64 y) { return i64(x <= y); });
      case kIntEq: return two<i64, i64>(i, [](i64 x, i64 y) { return i64(x == y); });
      case kIntNe: return two<i64, i64>(i, [](i64 x, i64 y) { return i64(x != y); });
      case kIntSum: integers(i.dst)[0] = fold(i.a, i64(0), [](i64 x, i64 y) { return x + y; }); return;
      case kIntLargest: integers(i.dst)[0] = fold(i.a, INT64_MIN, [](i64 x, i64 y) { return x > y ? x : y; }); return;
      case kIntSmallest: integers(i.dst)[0] = fold(i.a, INT64_MAX, [](i64 x, i64 y) { return x < y ? x : y; }); return;
    }
  }

  const Program& p_;
  const Argument* arguments_;
  Register at_[kMostRegisters];
  bool whole_[kMostRegisters];
  i64 place_[kMostDimensions], first_ = 0, count_ = 0;
};

}  // namespace
}  // namespace graphllm

extern "C" {
std::int64_t graphllm_done = 0;  // kernels so far; one thread runs them, others may look

struct GraphllmCall {
  void (*kernel)(const graphllm::Argument*);
  const graphllm::Argument* arguments;
};

void graphllm_run(const GraphllmCall* calls, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    calls[i].kernel(calls[i].arguments);
    __atomic_store_n(&graphllm_done, graphllm_done + 1, __ATOMIC_RELAXED);
  }
}

// The first argument is the program; the others are memory and sizes, by their numbers.
void call_graphllm_loop(const graphllm::Argument* arguments) {
  using namespace graphllm;
  const Program p = read(static_cast<const i64*>(arguments[0].ptr), arguments);
  const i64 items = p.rows * p.blocks;
  const auto work = [&] {
    static thread_local Scratch scratch;
    Machine machine(p, arguments, scratch.get<char>(p.bytes + 64));
    const Range range = share(items);
    for (i64 k = range.from; k < range.to; k++) machine.run(k / p.blocks, k % p.blocks);
  };
  if (items == 1 || items * p.block * p.instructions < kEnough) {
    work();
  } else {
#pragma omp parallel
    work();
  }
}
}
