// Where chunks land. At most one stream writes into a slot at a time, and a finished slot is never written again,
// though the same chunk may be on its way over several streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace p2pavg::pump {

class Landing {
  public:
    explicit Landing(size_t slots) : size_(slots), slots_(new std::atomic<uint64_t>[slots]()) {}

    size_t size() const { return size_; }
    bool done(size_t slot) const { return slots_[slot].load(std::memory_order_acquire) == kDone; }

    // The stream may write into the slot, piece by piece, between enter and leave.
    bool claim(size_t slot, uint64_t stream) { return swap(slot, kFree, owned(stream)); }
    // False when another stream has finished the slot meanwhile.
    bool enter(size_t slot, uint64_t stream) { return swap(slot, owned(stream), owned(stream) | kBusy); }
    void leave(size_t slot, uint64_t stream) { slots_[slot].store(owned(stream), std::memory_order_release); }
    void finish(size_t slot) { slots_[slot].store(kDone, std::memory_order_release); }
    void give_up(size_t slot, uint64_t stream) { swap(slot, owned(stream), kFree); }

    // The caller holds the whole chunk elsewhere: true when it shall copy it into the slot and then finish().
    bool take_over(size_t slot) {
        for (;;) {
            uint64_t state = slots_[slot].load(std::memory_order_acquire);
            if (state == kDone) return false;
            if ((state & kBusy) == 0 && swap(slot, state, kCopying)) return true;
            std::this_thread::yield();
        }
    }

  private:
    static constexpr uint64_t kFree = 0, kBusy = 1, kDone = 2, kCopying = 4 | kBusy;
    static uint64_t owned(uint64_t stream) { return (stream + 1) << 3; }
    bool swap(size_t slot, uint64_t from, uint64_t to) {
        return slots_[slot].compare_exchange_strong(from, to, std::memory_order_acq_rel);
    }

    const size_t size_;
    std::unique_ptr<std::atomic<uint64_t>[]> slots_;
};

// Something that chunks of one transfer land in.
class Receiver {
  public:
    Receiver(uint64_t transfer, size_t slots) : transfer(transfer), landing(slots) {}
    virtual ~Receiver() = default;

    // A chunk is whole and in place, and its slot finished.
    virtual void landed(uint32_t slot, uint32_t crc) = 0;

    const uint64_t transfer;
    Landing landing;
    std::atomic<bool> over{false};  // cancelled: its buffers may be gone
};

}  // namespace p2pavg::pump
