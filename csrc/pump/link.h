// All data streams to one peer, what waits to be sent there, and what its heartbeats told.
// Chunks go to whichever stream is free: streams pull from here.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "frame.h"

namespace p2pavg::pump {

class Job;
class Stream;

// IP bytes of connections since they began: headers, acknowledgements and what was sent again included.
struct Wire {
    uint64_t sent = 0, received = 0;

    void operator+=(const Wire &other) {
        sent += other.sent;
        received += other.received;
    }
};

// A blob chunk lent by Python until it is sent.
struct OutBlob {
    uint64_t transfer;
    uint32_t chunk;
    const uint8_t *data;
    uint32_t length;
};

// One frame to send.
struct Item {
    Kind kind = Kind::ping;
    bool repeat = false;
    uint32_t rank = 0;   // whom it goes to (contributions and results)
    uint32_t chunk = 0;  // of the job
    uint64_t stamp = 0;  // of a ping or pong
    std::shared_ptr<Job> job = {};
    std::shared_ptr<OutBlob> blob = {};
    uint64_t not_over = 0;  // uid of the stream that must not take it

    uint64_t transfer() const;
};

class Link {
  public:
    explicit Link(int64_t id) : id(id) {}

    const int64_t id;

    // Queues frames and wakes as many idle streams as there are frames.
    void push(std::vector<Item> items);
    // Puts back what a lost stream held, before everything else of its kind.
    void push_front(std::vector<Item> items);
    // The same, for other streams than this one; whose turn for anything else comes last.
    void push_elsewhere(std::vector<Item> items, const std::shared_ptr<Stream> &than);
    // The next frame for `by`: heartbeats, contributions, results, results for joiners, blobs. When there is none,
    // `by` is remembered as idle and woken when there is.
    bool pop(Item &out, const std::shared_ptr<Stream> &by);
    // Drops what waits for a transfer; only_voters keeps results for joiners.
    void purge(uint64_t transfer, bool only_voters);
    // The peer is gone: forgets its bytes, drops blobs, and results that only this joiner still waited for.
    void abandon();
    void clear();  // drops everything: queued frames hold their jobs, and jobs their links
    // Wakes idle streams: something held back may go now.
    void wake();

    void add(std::shared_ptr<Stream> stream);
    bool remove(const Stream *stream);
    std::vector<std::shared_ptr<Stream>> streams() const;
    size_t open_streams() const;
    std::shared_ptr<Stream> find(int64_t stream) const;
    std::pair<uint64_t, uint64_t> retired() const;  // bytes that closed streams sent and received
    Wire wire() const;  // of closed streams, too
    bool forgettable() const;  // detached, and nothing left of it

    void ask_ping(uint64_t stamp);
    void ask_pong(uint64_t stamp);
    void heard(double now) { last_heard.store(now, std::memory_order_relaxed); }
    void heard_ages(const Heartbeat &beat);
    void heard_pong(double rtt);

    std::atomic<double> last_heard{0};
    std::atomic<double> rtt{0};
    std::atomic<double> loop_age{kNever};  // at the last heartbeat
    std::atomic<double> trainer_age{kNever};

  private:
    static constexpr double kNever = std::numeric_limits<double>::infinity();
    std::deque<Item> &queue_of(const Item &item);
    std::vector<std::shared_ptr<Stream>> take_idle(size_t most);

    mutable std::mutex mutex_;
    std::deque<Item> contributions_, results_, joiners_, blobs_;
    std::optional<uint64_t> ping_, pong_;
    std::vector<std::shared_ptr<Stream>> streams_;
    std::deque<std::shared_ptr<Stream>> idle_;
    bool detached_ = false;
    uint64_t retired_sent_ = 0, retired_received_ = 0;
    Wire retired_wire_;
};

}  // namespace p2pavg::pump
