// A thread that owns streams: it waits for their sockets, steps the streams, and reduces the chunks of their frames.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "buffers.h"
#include "job.h"
#include "registry.h"
#include "stream.h"

namespace p2pavg::pump {

// A latch that counts down as workers finish a task; the loop thread waits for zero.
class Latch {
  public:
    explicit Latch(size_t count) : count_(count) {}
    void count_down() {
        std::lock_guard lock(mutex_);
        if (--count_ == 0) done_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return count_ == 0; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable done_;
    size_t count_;
};

class Worker {
  public:
    static constexpr size_t kScratchBytes = 64 << 10;

    explicit Worker(Shared &shared);
    ~Worker();  // requires stop() before

    // Callable on any thread. Tasks run on the worker, in order, between two steps of streams.
    void post(std::function<void()> task);
    void stop();
    bool is_current() const;
    double cpu_seconds() const;
    size_t load() const { return load_.load(std::memory_order_relaxed); }
    void reserve() { load_.fetch_add(1, std::memory_order_relaxed); }

    // Callable on this worker's thread only.
    void adopt(std::shared_ptr<Stream> stream);
    void drop(Stream &stream);
    void activate(const std::shared_ptr<Stream> &stream);
    void throttle(std::shared_ptr<Stream> stream);
    void reduce_locally(std::shared_ptr<Job> job);
    void release(const Receiver *receiver);
    void release_blob(uint64_t transfer);
    void settle(const Job *job);
    void resume_held();
    void unthrottle();  // the upload limit changed
    // Calls `beat` every interval; an interval of 0 stops the calls.
    void beat_every(double interval, std::function<void()> beat);
    BufferPool &buffers() { return buffers_; }
    uint8_t *scratch() { return scratch_.data(); }

  private:
    void run();
    void run_tasks();
    void wait(int timeout_ms);
    bool step(Stream &stream);  // false: it can do nothing now
    void run_timers(double now);
    int timeout_ms(double now) const;

    Shared &shared_;
    const int epoll_, wakeup_;
    BufferPool buffers_{16};
    Buffer scratch_{kScratchBytes};

    std::mutex mutex_;
    std::vector<std::function<void()>> tasks_;
    bool signalled_ = false;
    std::atomic<bool> stopping_{false};

    std::vector<std::shared_ptr<Stream>> streams_, active_, throttled_;
    std::vector<std::shared_ptr<Job>> local_;
    double beat_interval_ = 0, next_beat_ = 0;
    std::function<void()> beat_;
    std::atomic<size_t> load_{0};

    std::thread thread_;
    clockid_t clock_{};
    double spent_ = 0;
};

}  // namespace p2pavg::pump
