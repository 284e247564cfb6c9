// Reports interface.h as the compiler has it, in lines of text: values, offsets and sizes, signatures. Python writes
// the same lines from its own structures (kernels/interface.py), and compares both when it loads a library.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "interface.h"

namespace prefold {

struct Value {
  const char* name;
  int64_t value;
};

// A structure, or a field of a structure.
struct Place {
  const char* name;
  size_t offset, size;
};

struct Signature {
  const char* name;
  std::string letters;
};

// The letter for a parameter or result type: `LETTERS` of kernels/interface.py.
template <class T>
constexpr char letter() {
  constexpr bool is_number = std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> || std::is_same_v<T, float>;
  static_assert(std::is_pointer_v<T> || is_number, "Python has no letter for this type");
  return std::is_pointer_v<T> ? 'p' : std::is_same_v<T, int32_t> ? 'i' : std::is_same_v<T, int64_t> ? 'q' : 'f';
}

template <class Function>
struct Letters;
template <class... Arguments>
struct Letters<void(Arguments...)> {
  static std::string text() { return {':', letter<Arguments>()...}; }
};
template <class Result, class... Arguments>
struct Letters<Result(Arguments...)> {
  static std::string text() { return {letter<Result>(), ':', letter<Arguments>()...}; }
};

template <class Function>
std::string signature() {
  return Letters<Function>::text();
}

template <class Values, class Places, class Signatures>
std::string text_of(const Values& values, const Places& places, const Signatures& signatures) {
  std::string text;
  for (const Value& one : values) text += one.name + (' ' + std::to_string(one.value)) + '\n';
  for (const Place& one : places) {
    text += one.name + (' ' + std::to_string(one.offset)) + ' ' + std::to_string(one.size) + '\n';
  }
  for (const Signature& one : signatures) text += one.name + (' ' + one.letters) + '\n';
  return text;
}

}  // namespace prefold
