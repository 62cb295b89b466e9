// One TCP connection: a receiving and a sending state machine, both stepped by the worker that owns the stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "cipher.h"
#include "frame.h"
#include "job.h"
#include "link.h"
#include "registry.h"

namespace p2pavg::pump {

class Worker;

struct StreamStats {
    int64_t stream = 0;
    uint64_t bytes_sent = 0, bytes_received = 0;
    double rtt = 0;
    uint64_t window = 0;
    double delivery_rate = 0;  // bit/s
    uint64_t unacked = 0;  // sent bytes without acknowledgement
    uint64_t unsent = 0;   // bytes in the kernel that are not sent yet
    uint64_t unread = 0;   // bytes in the kernel that this stream has not read, as below its low-water mark
    double last_received_at = 0;
    uint32_t retransmits = 0;
};

// The keys of an encrypted stream; both are empty on a plain one.
struct StreamKeys {
    std::string sending, receiving;
};

class Stream : public std::enable_shared_from_this<Stream> {
  public:
    // Owns fd from the call on; throws std::system_error when fd is no TCP socket.
    Stream(uint64_t uid, int64_t id, int fd, std::shared_ptr<Link> link, Worker &worker, Shared &shared, StreamKeys keys);
    ~Stream();

    const uint64_t uid;
    const int64_t id;
    const int fd;

    // Callable on any thread.
    void wake();  // says that a frame may wait to be sent
    void pace(double bytes_per_second);  // limits the rate, and the unsent bytes in the kernel
    StreamStats stats() const;     // counters, and the kernel's figures
    StreamStats counters() const;  // without system calls
    Wire wire() const;
    Worker &worker() const { return worker_; }
    const std::shared_ptr<Link> &link() const { return link_; }

    // Callable on the owning worker's thread only.
    void ready(bool readable, bool writable, bool ending);
    bool step();  // moves at most one frame each way; true when more can be done without waiting
    void resume() { held_ = false; }  // a job began: check the frame that was held back again
    void release(const Receiver *receiver);  // stops using a receiver whose buffers are about to be freed
    void release_blob(uint64_t transfer);
    void settle(const Job *job);  // the job is over but for joiners: its contribution's memory may change
    void detach();  // receives all that has arrived, then closes
    void close();   // puts undelivered frames back into the link
    void repeat();  // lets other streams send this stream's undelivered frames, too; each frame once
    bool closed() const { return closed_; }
    double throttled_until() const { return throttled_until_; }
    void unthrottle() { throttled_until_ = 0; }
    bool active = false;  // in the worker's list of streams to step

  private:
    struct Incoming {
        enum class To { nowhere, place, buffer, sum, heartbeat };
        Header header;
        uint8_t raw[kHeaderBytes];  // the header's bytes as received
        To to = To::nowhere;
        std::shared_ptr<Receiver> receiver;
        uint32_t slot = 0;
        uint8_t *place = nullptr;
        Buffer buffer;
        uint32_t got = 0;
    };
    struct Outgoing {
        Item item;
        uint8_t header[kHeaderBytes];
        uint8_t heartbeat[kHeartbeatBytes];
        const uint8_t *body = nullptr;
        uint32_t length = 0;  // bytes of the body and its tag
        size_t sent = 0;  // bytes sent of header and body
        Buffer buffer;
        bool loaded = false;
        bool repeated = false;
    };
    struct Delivery {
        uint64_t end;  // where the frame ends, in bytes sent over this stream
        Item item;
        bool repeated = false;
    };

    // stream_receive.cpp
    void receive();
    bool fill_tail(size_t until);
    void begin_frame();
    void route(const Header &header);
    bool fill_body();
    void end_frame();
    bool intact(uint8_t *body);
    bool unpack();
    ssize_t read(void *body, size_t body_bytes, bool and_tail);
    void want(size_t bytes);
    // stream_send.cpp
    void transmit();
    bool load();
    void load_contribution(const Job &job, Header &header, bool &finite);
    void pack(Header &header);
    double link_rate() const;
    void encrypt(const Header &header);
    void delivered();
    void forget_acknowledged(size_t keep);
    uint64_t acknowledged() const;
    std::vector<Item> undelivered();
    void detach_body();

    void fail(const std::string &reason);

    const std::shared_ptr<Link> link_;
    Worker &worker_;
    Shared &shared_;
    const uint64_t header_bytes_;

    bool readable_ = true, writable_ = true, closed_ = false, held_ = false, in_body_ = false, idle_ = false,
         ending_ = false;
    bool no_low_water_ = false;  // whether the path is long, where a mark would delay acknowledgements
    int low_water_ = 1;
    // The tail of a body: its tag, on encrypted streams, and the next header.
    static constexpr size_t kTailBytes = kTagBytes + kHeaderBytes;
    uint8_t tail_[kTailBytes];
    size_t tail_got_ = kTagBytes;
    const std::unique_ptr<Cipher> encrypting_, decrypting_;
    uint64_t frames_begun_ = 0, frames_received_ = 0;
    Incoming in_;
    Outgoing out_;
    std::deque<Delivery> deliveries_;
    double throttled_until_ = 0;
    uint64_t arrived_before_ = 0;  // bytes received in the handshake
    std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0};
    std::atomic<double> last_received_at_{0};
    std::atomic<bool> wanted_{false};
};

}  // namespace p2pavg::pump
