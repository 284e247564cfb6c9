// The compiled library that a program of test_emulated.py is given, and memory for what it computes.
#pragma once

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>

#include "../../prefold/kernels/src/interface.h"

#ifdef _WIN32
inline HMODULE library;
#else
inline void* library;
#endif

inline void open_library(const char* path) {
#ifdef _WIN32
  library = LoadLibraryA(path);
  if (!library) printf("error %lu\n", GetLastError()), exit(2);
#else
  library = dlopen(path, RTLD_NOW);
  if (!library) puts(dlerror()), exit(2);
#endif
}

template <class F>
F* function(const char* name) {
#ifdef _WIN32
  const auto found = GetProcAddress(library, name);
#else
  void* found = dlsym(library, name);
#endif
  if (!found) printf("%s is missing\n", name), exit(2);
  return reinterpret_cast<F*>(found);
}

// A function of the library, of the type that the interface declares.
#define FUNCTION(name) function<decltype(prefold::name)>(#name)

constexpr std::align_val_t kPage{4096};

struct FreePages {
  void operator()(uint8_t* memory) const { ::operator delete(memory, kPage); }
};

// Memory that begins at a page.
inline std::unique_ptr<uint8_t, FreePages> pages(int64_t bytes) {
  return std::unique_ptr<uint8_t, FreePages>(static_cast<uint8_t*>(::operator new(bytes, kPage)));
}
