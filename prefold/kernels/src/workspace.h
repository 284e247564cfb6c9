// Scratch memory that a thread reuses from call to call.
#pragma once

#include <cstddef>
#include <new>

namespace prefold {

// Scratch memory of one thread. A step calls each kernel once per layer with the same sizes, and fresh pages would cost
// as much as packing does.
class Workspace {
 public:
  ~Workspace() { release(); }

  void* reserve(std::size_t bytes) {
    if (bytes > size_) {
      release();
      const std::size_t pages = (bytes + kPage - 1) / kPage * kPage;
      memory_ = ::operator new(pages, std::align_val_t{kPage});
      size_ = pages;
    }
    return memory_;
  }

 private:
  static constexpr std::size_t kPage = 4096;

  void release() {
    ::operator delete(memory_, std::align_val_t{kPage});
    memory_ = nullptr;
    size_ = 0;
  }

  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace prefold
