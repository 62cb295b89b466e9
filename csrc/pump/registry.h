// The objects that all threads of one pump share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "buffers.h"
#include "events.h"
#include "landing.h"
#include "limiter.h"

namespace p2pavg::pump {

// The open transfers.
class Transfers {
  public:
    std::shared_ptr<Receiver> find(uint64_t transfer) const {
        std::lock_guard lock(mutex_);
        auto found = open_.find(transfer);
        return found == open_.end() ? nullptr : found->second;
    }
    bool add(std::shared_ptr<Receiver> receiver) {
        std::lock_guard lock(mutex_);
        const uint64_t transfer = receiver->transfer;
        return open_.emplace(transfer, std::move(receiver)).second;
    }
    std::shared_ptr<Receiver> remove(uint64_t transfer) {
        std::lock_guard lock(mutex_);
        auto found = open_.find(transfer);
        if (found == open_.end()) return nullptr;
        auto receiver = std::move(found->second);
        open_.erase(found);
        return receiver;
    }
    void clear() {
        std::lock_guard lock(mutex_);
        open_.clear();
    }

  private:
    mutable std::mutex mutex_;
    std::unordered_map<uint64_t, std::shared_ptr<Receiver>> open_;
};

// All file descriptors, readable without a lock: a forked child closes them, where a thread that the child does not
// have may have held any lock.
class Descriptors {
  public:
    static constexpr size_t kMost = 4096;
    bool add(int fd) {
        for (auto &slot : slots_) {
            int free = 0;
            if (slot.compare_exchange_strong(free, fd + 1)) return true;
        }
        return false;
    }
    void remove(int fd) {
        for (auto &slot : slots_) {
            int expected = fd + 1;
            if (slot.compare_exchange_strong(expected, 0)) return;
        }
    }
    template <typename Action>
    void each(Action action) const {
        for (auto &slot : slots_)
            if (int value = slot.load()) action(value - 1);
    }

  private:
    std::atomic<int> slots_[kMost] = {};
};

struct Shared {
    EventQueue events;
    Limiter limiter;
    Transfers transfers;
    Descriptors descriptors;
    BufferPool accumulators{SIZE_MAX};
    std::atomic<double> loop_seen{0};     // monotonic; 0: never
    std::atomic<double> trainer_seen{0};  // monotonic; 0: never
    std::atomic<uint64_t> spared{0};      // bytes of chunks that were not sent because the chunks were packed
};

}  // namespace p2pavg::pump
