// Receives the chunks of a state: chunk i is written at buffer + i * chunk_bytes.
#pragma once

#include <algorithm>

#include "events.h"
#include "landing.h"

namespace p2pavg::pump {

class Blob : public Receiver {
  public:
    Blob(uint64_t transfer, uint8_t *buffer, size_t bytes, size_t chunk_bytes, EventQueue &events)
        : Receiver(transfer, chunk_bytes ? (bytes + chunk_bytes - 1) / chunk_bytes : 0),
          buffer_(buffer), bytes_(bytes), chunk_bytes_(chunk_bytes), events_(events) {}

    // The bytes of a chunk; 0 when the blob has no such chunk.
    uint32_t length(uint32_t chunk) const {
        if (chunk >= landing.size()) return 0;
        return static_cast<uint32_t>(std::min(bytes_ - chunk * chunk_bytes_, chunk_bytes_));
    }

    // The address for a chunk that comes in so many bytes, packed or as it is; nullptr when it cannot be one of these.
    uint8_t *place(uint32_t chunk, uint32_t bytes, bool packed) const {
        const uint32_t whole = length(chunk);
        if (whole == 0 || (packed ? bytes >= whole : bytes != whole)) return nullptr;
        return buffer_ + chunk * chunk_bytes_;
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
