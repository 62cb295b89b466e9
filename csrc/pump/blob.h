// Receives the chunks of a state: chunk i is written at buffer + i * chunk_bytes.
#pragma once

#include "events.h"
#include "landing.h"

namespace p2pavg::pump {

class Blob : public Receiver {
  public:
    Blob(uint64_t transfer, uint8_t *buffer, size_t bytes, size_t chunk_bytes, EventQueue &events)
        : Receiver(transfer, chunk_bytes ? (bytes + chunk_bytes - 1) / chunk_bytes : 0),
          buffer_(buffer), bytes_(bytes), chunk_bytes_(chunk_bytes), events_(events) {}

    // The address for a chunk of this length; nullptr when the blob has no such chunk.
    uint8_t *place(uint32_t chunk, uint32_t length) const {
        if (chunk >= landing.size()) return nullptr;
        const size_t at = chunk * chunk_bytes_;
        const size_t expected = bytes_ - at < chunk_bytes_ ? bytes_ - at : chunk_bytes_;
        return length == expected ? buffer_ + at : nullptr;
    }

    void landed(uint32_t slot, uint32_t) override {
        events_.post({Event::Type::blob_chunk, 0, 0, transfer, slot, {}});
    }

  private:
    uint8_t *const buffer_;
    const size_t bytes_, chunk_bytes_;
    EventQueue &events_;
};

}  // namespace p2pavg::pump
