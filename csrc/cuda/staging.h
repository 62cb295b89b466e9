// Gradients between device and host, chunk by chunk: encode and copy overlap on two streams of their own over a small
// ring of device buffers, so the device holds O(ring) extra bytes, and no call waits for a stream of the trainer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch.h"

namespace p2pavg {

class CudaError : public std::runtime_error {
  public:
    CudaError(cudaError_t error, const char *doing)
        : std::runtime_error(std::string("CUDA: ") + doing + ": " + cudaGetErrorString(error)) {}
};

inline void check(cudaError_t error, const char *doing) {
    if (error != cudaSuccess) throw CudaError(error, doing);
}

// Makes a device current, and the former device again in the destructor.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&before_), "asking for the current device");
        if (before_ != device) check(cudaSetDevice(device), "changing the device");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(const DeviceGuard &) = delete;
    DeviceGuard &operator=(const DeviceGuard &) = delete;

  private:
    int before_ = 0;
};

class Event {
  public:
    Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;
    cudaEvent_t get() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

// Page-locked ints that are used again: freeing page-locked memory would wait for the whole device.
class Flags : public std::enable_shared_from_this<Flags> {
  public:
    Flags() = default;
    ~Flags();
    Flags(const Flags &) = delete;
    Flags &operator=(const Flags &) = delete;
    std::shared_ptr<int> take();  // its deleter returns the int to the pool

  private:
    std::mutex lock_;
    std::vector<int *> free_;
};

// One running transfer. All its work is enqueued; `done` counts the chunks whose bytes (or values) are in place.
class Transfer {
  public:
    Transfer() = default;
    ~Transfer();  // waits for the transfer, so that no memory in use is freed
    Transfer(const Transfer &) = delete;
    Transfer &operator=(const Transfer &) = delete;

    size_t done();       // returns the number of first chunks that are in place; does not block
    bool wait();         // blocks until all chunks are in place; true when all values were finite
    void hold(cudaStream_t stream);  // makes `stream` wait until the device memory has been read or written

  private:
    friend class Staging;
    struct Piece {
        std::unique_ptr<Event> finished;
        size_t chunks;  // in place when this piece and all before it have `finished`
    };
    int device_ = 0;
    std::vector<Piece> pieces_;
    size_t next_ = 0, done_ = 0;
    std::unique_ptr<Event> device_side_;
    std::shared_ptr<int> flag_;  // pinned; 1 when a value was not finite, valid after the last piece
};

class Staging {
  public:
    // `slots` device buffers of `slot_bytes` each.
    Staging(int device, size_t slot_bytes, int slots);
    ~Staging();
    Staging(const Staging &) = delete;
    Staging &operator=(const Staging &) = delete;

    // host[encoded chunks of n] <- encode(src * scale), after the work enqueued on `stream` so far. The call is
    // asynchronous if host memory is pinned. src must not change before a stream that `hold` made wait goes on.
    // feedback.owed must not change, nor feedback.kept be read, before `wait`.
    std::unique_ptr<Transfer> download(int codec, const float *src, size_t n, size_t chunk, float scale,
                                       const Draws &draws, const Feedback &feedback, uint8_t *host, cudaStream_t stream);

    // dst = decode(host) * scale, after the work enqueued on `stream` so far.
    std::unique_ptr<Transfer> upload(int codec, const uint8_t *host, size_t n, size_t chunk, float scale, float *dst,
                                     cudaStream_t stream);

    size_t device_bytes() const { return slots_.size() * slot_bytes_; }

  private:
    struct Slot {
        uint8_t *bytes = nullptr;
        Event free;  // recorded after the slot's last use
    };
    struct Plan {
        size_t chunk, chunk_bytes, chunks_per_piece;
    };
    Plan plan(int codec, size_t n, size_t chunk) const;
    Slot &next_slot();
    void begin(Transfer &transfer, cudaStream_t first, cudaStream_t stream);

    int device_;
    size_t slot_bytes_;
    std::vector<std::unique_ptr<Slot>> slots_;
    size_t turn_ = 0;
    cudaStream_t compute_ = nullptr, copy_ = nullptr;
    int *flag_ = nullptr;
    std::shared_ptr<Flags> flags_ = std::make_shared<Flags>();
};

}  // namespace p2pavg
