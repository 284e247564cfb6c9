// Memory that a thread keeps between its calls.
#pragma once

#include <cstdlib>
#include <new>

namespace prefold {

// Memory of one thread's calls, kept between them: a step has a call a layer, all of one size, and fresh
// pages would cost as much as the packing.
class Workspace {
 public:
  ~Workspace() { free(memory_); }

  void* reserve(size_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(4096, size_);
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace prefold
