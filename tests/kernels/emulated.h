// The compiled library that a program of test_emulated.py is given.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

inline void* library;

inline void open_library(const char* path) {
  library = dlopen(path, RTLD_NOW);
  if (!library) puts(dlerror()), exit(2);
}

template <class F>
F* function(const char* name) {
  void* found = dlsym(library, name);
  if (!found) printf("%s is missing\n", name), exit(2);
  return reinterpret_cast<F*>(found);
}
