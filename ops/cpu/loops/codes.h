// The instructions of loop programs. `graphllm.compile.codegen.loops` reads their names and order from here.
//
// A register holds floats or 64-bit integers: one for the whole row, or one for each place of the inner dimension.
#pragma once

namespace graphllm {
namespace {

enum Code {
  kLoad,          // dst = tensor a
  kGather,        // dst = tensor a, at offsets b within it
  kStore,         // tensor dst = a
  kScatter,       // tensor dst = a, at offsets b within it
  kBind,          // dst is computed in the memory of tensor a
  kPlace,         // dst = number of the place in the inner dimension
  kRow,           // dst = number of the row along dimension a
  kSize,          // dst = size a
  kFloat,         // dst = float of integers a
  kInt,           // dst = integers of a, cut off
  kBool,          // dst = a is not zero
  kRoundBf16,     // of floats from here on
  kRoundF16,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kPow,
  kMod,           // with the sign of b
  kNeg,
  kAbs,
  kExp,
  kExp2,
  kExpm1,
  kLog,
  kLog1p,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kSin,
  kCos,
  kTanh,
  kSigmoid,
  kErf,
  kFloor,
  kCeil,
  kRound,
  kTrunc,
  kChoose,        // dst = integers a ? b : c
  kLt,
  kLe,
  kEq,
  kNe,
  kIsNan,
  kSum,           // of a row: dst is one number
  kMean,
  kLargest,
  kSmallest,
  kIntAdd,        // of integers from here on
  kIntSub,
  kIntMul,
  kIntDiv,        // rounded down
  kIntMod,
  kIntMax,
  kIntMin,
  kIntNeg,
  kIntAbs,
  kIntAnd,
  kIntOr,
  kIntXor,
  kIntNot,
  kIntShiftLeft,
  kIntShiftRight,
  kIntChoose,
  kIntLt,
  kIntLe,
  kIntEq,
  kIntNe,
  kIntSum,
  kIntLargest,
  kIntSmallest,
};

}  // namespace
}  // namespace graphllm
