// The pump: native threads that transfer and reduce chunks without Python. The C++ side of p2pavg's Engine.
//
// All methods except note_trainer are called on the event loop's thread, and none waits for the network.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "blob.h"
#include "job.h"
#include "link.h"
#include "registry.h"
#include "stream.h"
#include "worker.h"

namespace p2pavg::pump {

constexpr int64_t kSelf = -1;

struct LinkHealth {
    double last_heard_at = 0, rtt = 0;
    double loop_age = std::numeric_limits<double>::infinity(), trainer_age = loop_age;  // at the last heartbeat
};

class Pump {
  public:
    explicit Pump(size_t threads);
    ~Pump();
    Pump(const Pump &) = delete;
    Pump &operator=(const Pump &) = delete;

    int event_fd() const { return shared_->events.fd(); }
    std::vector<Event> drain() { return shared_->events.drain(); }

    // Owns fd from the call on, even when it throws. Returns the stream's unique id, which events name.
    uint64_t attach(int64_t link, int64_t stream, int fd, StreamKeys keys = {});
    void detach(int64_t link, int64_t stream);
    void detach_all(int64_t link);
    void repeat(int64_t link, int64_t stream);
    void pace(int64_t link, double bytes_per_second);  // limits each stream of the link
    std::vector<int64_t> streams(int64_t link) const;

    void open_reduce(ReduceJob spec, const std::vector<int64_t> &links);
    void begin(uint64_t transfer, Start start);
    void supply(uint64_t transfer, uint32_t ready);
    void cancel(uint64_t transfer);
    // Ends a job, except for results to joiners. Returns true, and forgets the job, when no such result is left; else
    // the event `released` follows when all are sent, after which the caller cancels.
    bool finish(uint64_t transfer);
    std::shared_ptr<Job> job(uint64_t transfer) const;

    void open_blob(uint64_t transfer, uint8_t *buffer, size_t bytes, size_t chunk_bytes);
    void send_blob(int64_t link, uint64_t transfer, uint32_t chunk, const uint8_t *data, size_t length);

    std::vector<StreamStats> stats(int64_t link) const;
    std::pair<uint64_t, uint64_t> traffic(int64_t link) const;  // bytes sent and received, closed streams included
    Wire wire(int64_t link) const;  // closed streams included
    LinkHealth health(int64_t link) const;
    void set_heartbeat(double interval);
    void note_loop();
    void note_trainer();
    void set_upload_limit(double bytes_per_second);
    double cpu_seconds() const;
    uint64_t spared() const { return shared_->spared.load(std::memory_order_relaxed); }

    void close();
    // For a forked child: closes the file descriptors and touches nothing else, as the child does not have the threads.
    void abandon();

  private:
    void wake_for(const std::shared_ptr<Job> &of);
    std::shared_ptr<Link> link(int64_t id);
    std::shared_ptr<Link> known(int64_t id) const;
    void on_all_workers(const std::function<void(Worker &)> &task);
    void sweep();

    Shared *shared_;  // leaked in a forked child
    std::vector<std::unique_ptr<Worker>> workers_;
    std::unordered_map<int64_t, std::shared_ptr<Link>> links_;
    uint64_t next_uid_ = 1;
    bool closed_ = false, abandoned_ = false;

    struct Beat;
    std::shared_ptr<Beat> beat_;
};

}  // namespace p2pavg::pump
