// The slots of received chunks. At most one stream writes into a slot at a time, and a finished slot is never written
// again, although several streams may receive the same chunk.
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

    // Claims a slot for a stream, which may then write into the slot, in several steps, between enter and leave.
    bool claim(size_t slot, uint64_t stream) { return swap(slot, kFree, owned(stream)); }
    // Returns false when another stream has finished the slot meanwhile.
    bool enter(size_t slot, uint64_t stream) { return swap(slot, owned(stream), owned(stream) | kBusy); }
    void leave(size_t slot, uint64_t stream) { slots_[slot].store(owned(stream), std::memory_order_release); }
    void finish(size_t slot) { slots_[slot].store(kDone, std::memory_order_release); }
    void give_up(size_t slot, uint64_t stream) { swap(slot, owned(stream), kFree); }

    // For a caller that has the whole chunk elsewhere: true if the caller has to copy it into the slot, then finish().
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

// Receives the chunks of one transfer.
class Receiver {
  public:
    Receiver(uint64_t transfer, size_t slots) : transfer(transfer), landing(slots) {}
    virtual ~Receiver() = default;

    // Called when a chunk is whole and in place, and its slot is finished.
    virtual void landed(uint32_t slot, uint32_t crc) = 0;

    const uint64_t transfer;
    Landing landing;
    std::atomic<bool> over{false};  // true once cancelled: the receiver's buffers may be freed
};

}  // namespace p2pavg::pump
