// The pump's events for the event loop: a queue that one call drains, and an eventfd that is readable unless empty.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

namespace p2pavg::pump {

struct Event {
    enum class Type { stream_closed, job_done, job_refused, blob_chunk, blob_sent, released };
    Type type;
    int64_t link = 0;
    uint64_t stream = 0;  // unique id that attach() returned
    uint64_t transfer = 0;
    uint32_t index = 0;  // rank or chunk
    std::string text = {};
};

class EventQueue {
  public:
    EventQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    ~EventQueue() { ::close(fd_); }
    EventQueue(const EventQueue &) = delete;
    EventQueue &operator=(const EventQueue &) = delete;

    int fd() const { return fd_; }

    void post(Event event) {
        bool first;
        {
            std::lock_guard lock(mutex_);
            first = events_.empty();
            events_.push_back(std::move(event));
        }
        if (first) {
            const uint64_t one = 1;
            [[maybe_unused]] ssize_t written = ::write(fd_, &one, sizeof one);
        }
    }

    std::vector<Event> drain() {
        uint64_t count;
        [[maybe_unused]] ssize_t got = ::read(fd_, &count, sizeof count);
        std::vector<Event> taken;
        std::lock_guard lock(mutex_);
        taken.swap(events_);
        return taken;
    }

  private:
    const int fd_;
    std::mutex mutex_;
    std::vector<Event> events_;
};

}  // namespace p2pavg::pump
