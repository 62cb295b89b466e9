// Pooled buffers, because the kernel would map and zero every page of a new array for each chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace p2pavg::pump {

class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t bytes) : capacity_((bytes + kGrain - 1) / kGrain * kGrain) {
        if (capacity_ == 0) capacity_ = kGrain;
        data_ = static_cast<uint8_t *>(std::aligned_alloc(kGrain, capacity_));
        if (!data_) throw std::bad_alloc();
    }
    Buffer(Buffer &&other) noexcept
        : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}
    Buffer &operator=(Buffer &&other) noexcept {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
        return *this;
    }
    ~Buffer() { std::free(data_); }

    uint8_t *data() const { return data_; }
    size_t capacity() const { return capacity_; }
    explicit operator bool() const { return data_ != nullptr; }

  private:
    static constexpr size_t kGrain = 4096;
    uint8_t *data_ = nullptr;
    size_t capacity_ = 0;
};

// Last in, first out: the buffer returned last is the most likely one to be in cache.
class BufferPool {
  public:
    explicit BufferPool(size_t keep) : keep_(keep) {}

    Buffer take(size_t bytes) {
        {
            std::lock_guard lock(mutex_);
            while (!free_.empty()) {
                Buffer buffer = std::move(free_.back());
                free_.pop_back();
                if (buffer.capacity() >= bytes) return buffer;
            }
        }
        return Buffer(bytes);
    }

    void give(Buffer &&buffer) {
        if (!buffer) return;
        Buffer mine = std::move(buffer);
        std::lock_guard lock(mutex_);
        if (free_.size() < keep_) free_.push_back(std::move(mine));
    }

    void clear() {
        std::lock_guard lock(mutex_);
        free_.clear();
    }

  private:
    std::mutex mutex_;
    const size_t keep_;
    std::vector<Buffer> free_;
};

}  // namespace p2pavg::pump
