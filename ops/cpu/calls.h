// How the loader calls a kernel: with its arguments in memory, 8 bytes each (`graphllm.runtime.kernels`).
#pragma once

#include <cstdint>
#include <utility>

namespace graphllm {
namespace {

union Argument {
  void* ptr;
  std::int64_t i64;
  double f64;
};

template <typename T>
inline T given(const Argument& argument) {
  if constexpr (std::is_pointer_v<T>)
    return static_cast<T>(argument.ptr);
  else if constexpr (std::is_floating_point_v<T>)
    return argument.f64;
  else
    return argument.i64;
}

template <typename... Types, std::size_t... kIndex>
inline void call(void (*kernel)(Types...), const Argument* arguments, std::index_sequence<kIndex...>) {
  kernel(given<Types>(arguments[kIndex])...);
}
template <typename... Types>
inline void call(void (*kernel)(Types...), const Argument* arguments) {
  call(kernel, arguments, std::index_sequence_for<Types...>());
}

}  // namespace
}  // namespace graphllm

// Defines call_<name>, by which the loader calls the kernel `name`. Of a kernel that a macro declares, the macro has it.
#define GRAPHLLM_KERNEL(name) \
  extern "C" void call_##name(const graphllm::Argument* arguments) { graphllm::call(name, arguments); }
