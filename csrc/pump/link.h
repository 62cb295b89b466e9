// All data streams to one peer, the frames that wait to be sent to it, and the facts from its heartbeats.
// Each idle stream takes the next frame from here.
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

// IP bytes of connections since their beginning, including headers, acknowledgements and retransmissions.
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
    uint32_t rank = 0;   // receiver (of contributions and results)
    uint32_t chunk = 0;  // number in the job
    uint64_t stamp = 0;  // of a ping or pong
    std::shared_ptr<Job> job = {};
    std::shared_ptr<OutBlob> blob = {};
    uint64_t not_over = 0;  // uid of the stream that must not take it
    double turn = 0;  // contributions of one job leave by it, lowest first: how far into its part the chunk is, 0 to 1

    uint64_t transfer() const;
};

class Link {
  public:
    explicit Link(int64_t id) : id(id) {}

    const int64_t id;

    // Queues frames and wakes as many idle streams as there are frames.
    void push(std::vector<Item> items);
    // Puts the frames of a lost stream back, before all other frames of their kind.
    void push_front(std::vector<Item> items);
    // Queues frames for other streams than this one, which becomes the last to be woken for others.
    void push_elsewhere(std::vector<Item> items, const std::shared_ptr<Stream> &than);
    // The next frame for `by`: heartbeats, contributions, results, results for joiners, blobs. When there is none,
    // `by` is remembered as idle and woken when there is.
    bool pop(Item &out, const std::shared_ptr<Stream> &by);
    // Drops the queued frames of a transfer; only_voters keeps results for joiners.
    void purge(uint64_t transfer, bool only_voters);
    // Called when the peer is gone: drops its byte counts, its blobs, and results for which it waited as a joiner.
    void abandon();
    void clear();  // drops everything: queued frames hold their jobs, and jobs their links
    // Wakes idle streams, as a frame that was held back may be sendable now.
    void wake();

    void add(std::shared_ptr<Stream> stream);
    bool remove(const Stream *stream);
    std::vector<std::shared_ptr<Stream>> streams() const;
    size_t open_streams() const;
    std::shared_ptr<Stream> find(int64_t stream) const;
    std::pair<uint64_t, uint64_t> retired() const;  // bytes that closed streams sent and received
    Wire wire() const;  // including closed streams
    bool forgettable() const;  // detached, without streams or frames

    // Sends a PING soon. It asks for an answer when no PING of the other side came for a second, and each second
    // for the round trip: where both sides send PINGs, answering each would double them. A PING replaces one that
    // no stream has taken yet, and asks if that one asked.
    void ask_ping(double now);
    void ask_pong(uint64_t stamp);
    void heard(double now) { last_heard.store(now, std::memory_order_relaxed); }
    void heard_ping(double now) { last_ping_.store(now, std::memory_order_relaxed); }
    void heard_ages(const Heartbeat &beat);
    void heard_pong(double rtt);

    std::atomic<double> last_heard{0};
    std::atomic<double> rtt{0};
    std::atomic<double> loop_age{kNever};  // at the last heartbeat
    std::atomic<double> trainer_age{kNever};

  private:
    static constexpr double kNever = std::numeric_limits<double>::infinity();
    static constexpr double kAnswerS = 1.0;
    std::deque<Item> &queue_of(const Item &item);
    void put(Item item);
    std::vector<std::shared_ptr<Stream>> take_idle(size_t most);

    mutable std::mutex mutex_;
    std::deque<Item> contributions_, results_, joiners_, blobs_;
    std::optional<uint64_t> ping_, pong_;
    double asked_at_ = -kNever;
    std::atomic<double> last_ping_{-kNever};
    std::vector<std::shared_ptr<Stream>> streams_;
    std::deque<std::shared_ptr<Stream>> idle_;
    bool detached_ = false;
    uint64_t retired_sent_ = 0, retired_received_ = 0;
    Wire retired_wire_;
};

}  // namespace p2pavg::pump
