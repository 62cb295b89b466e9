#include "worker.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>

#include "clock.h"

namespace p2pavg::pump {

namespace {

int checked(int fd, const char *what) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
    return fd;
}

constexpr size_t kSteps = 16;  // of a link, by all its streams, and of a job by itself, before others have their turn

thread_local const Worker *current = nullptr;

}  // namespace

Worker::Worker(Shared &shared)
    : shared_(shared), epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wakeup_(checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd")) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.ptr = nullptr;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wakeup_, &event);
    shared_.descriptors.add(epoll_);
    shared_.descriptors.add(wakeup_);
    sigset_t all, before;  // blocks all signals, which Python's threads handle
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_getcpuclockid(thread_.native_handle(), &clock_);
}

Worker::~Worker() {
    shared_.descriptors.remove(epoll_);
    shared_.descriptors.remove(wakeup_);
    ::close(epoll_);
    ::close(wakeup_);
}

void Worker::post(std::function<void()> task) {
    bool signal;
    {
        std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        signal = !signalled_ && current != this;
        signalled_ = signalled_ || signal;
    }
    if (signal) {
        const uint64_t one = 1;
        [[maybe_unused]] ssize_t written = ::write(wakeup_, &one, sizeof one);
    }
}

void Worker::stop() {
    if (!thread_.joinable()) return;
    post([this] { stopping_ = true; });
    thread_.join();
}

bool Worker::is_current() const { return current == this; }

double Worker::cpu_seconds() const {
    if (!thread_.joinable()) return spent_;
    timespec spent{};
    clock_gettime(clock_, &spent);
    return seconds(spent);
}

void Worker::adopt(std::shared_ptr<Stream> stream) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.ptr = stream.get();
    epoll_ctl(epoll_, EPOLL_CTL_ADD, stream->fd, &event);
    activate(stream);
    streams_.push_back(std::move(stream));
}

void Worker::drop(Stream &stream) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, stream.fd, nullptr);
    auto same = [&](const std::shared_ptr<Stream> &other) { return other.get() == &stream; };
    throttled_.erase(std::remove_if(throttled_.begin(), throttled_.end(), same), throttled_.end());
    streams_.erase(std::remove_if(streams_.begin(), streams_.end(), same), streams_.end());
    load_.fetch_sub(1, std::memory_order_relaxed);
}

void Worker::activate(const std::shared_ptr<Stream> &stream) {
    if (stream->active || stream->closed()) return;
    stream->active = true;
    active_.push_back(stream);
}

void Worker::throttle(std::shared_ptr<Stream> stream) { throttled_.push_back(std::move(stream)); }

void Worker::reduce_locally(std::shared_ptr<Job> job) { local_.push_back(std::move(job)); }

void Worker::release(const Receiver *receiver) {
    local_.erase(std::remove_if(local_.begin(), local_.end(), [&](auto &job) { return job.get() == receiver; }),
                 local_.end());
    for (auto &stream : streams_) stream->release(receiver);
    resume_held();
}

void Worker::release_blob(uint64_t transfer) {
    for (auto &stream : streams_) stream->release_blob(transfer);
}

void Worker::settle(const Job *job) {
    for (auto &stream : streams_) stream->settle(job);
}

void Worker::resume_held() {
    for (auto &stream : streams_) {
        stream->resume();
        activate(stream);
    }
}

void Worker::unthrottle() {
    for (auto &stream : throttled_) {
        stream->unthrottle();
        activate(stream);
    }
    throttled_.clear();
}

void Worker::beat_every(double interval, std::function<void()> beat) {
    beat_interval_ = interval;
    beat_ = std::move(beat);
    next_beat_ = monotonic();
}

void Worker::run_tasks() {
    std::vector<std::function<void()>> tasks;
    {
        std::lock_guard lock(mutex_);
        tasks.swap(tasks_);
        if (signalled_) {
            uint64_t count;
            [[maybe_unused]] ssize_t got = ::read(wakeup_, &count, sizeof count);
            signalled_ = false;
        }
    }
    for (auto &task : tasks) task();
}

int Worker::timeout_ms(double now) const {
    if (!active_.empty() || !local_.empty()) return 0;
    double next = INFINITY;
    if (beat_interval_ > 0) next = next_beat_;
    for (auto &stream : throttled_) next = std::min(next, stream->throttled_until());
    if (std::isinf(next)) return -1;
    return next <= now ? 0 : static_cast<int>(std::min(60000.0, std::ceil((next - now) * 1e3)));
}

void Worker::run_timers(double now) {
    if (beat_interval_ > 0 && now >= next_beat_) {
        next_beat_ = now + beat_interval_;
        beat_();
    }
    for (size_t i = 0; i < throttled_.size();) {
        if (throttled_[i]->throttled_until() > now) {
            ++i;
            continue;
        }
        throttled_[i]->unthrottle();
        activate(throttled_[i]);
        throttled_.erase(throttled_.begin() + static_cast<ptrdiff_t>(i));
    }
}

void Worker::wait(int timeout) {
    {
        // Tasks that this thread posts to itself do not signal the eventfd.
        std::lock_guard lock(mutex_);
        if (!tasks_.empty()) timeout = 0;
    }
    epoll_event events[64];
    const int count = epoll_wait(epoll_, events, 64, timeout);
    for (int i = 0; i < count; ++i) {
        auto *stream = static_cast<Stream *>(events[i].data.ptr);
        if (!stream) continue;
        const uint32_t told = events[i].events;
        const bool broken = told & (EPOLLHUP | EPOLLERR), ending = broken || (told & EPOLLRDHUP);
        stream->ready(ending || (told & EPOLLIN), broken || (told & EPOLLOUT), ending);
        activate(stream->shared_from_this());
    }
}

// Each link gets as many steps, however many streams it has: on a busy machine a lone stream between two neighbours
// would else get a small part of what each far link gets.
bool Worker::step(Stream &stream) {
    const size_t streams = std::max<size_t>(1, stream.link()->open_streams());
    for (size_t steps = std::max<size_t>(1, kSteps / streams); steps > 1; --steps)
        if (!stream.step()) return false;
    return stream.step();
}

void Worker::run() {
    current = this;
    pthread_setname_np(pthread_self(), "p2pavg-pump");
    std::vector<std::shared_ptr<Stream>> batch;
    while (!stopping_) {
        double now = monotonic();
        wait(timeout_ms(now));
        run_tasks();
        if (beat_interval_ > 0 || !throttled_.empty()) run_timers(monotonic());
        batch.swap(active_);
        for (auto &stream : batch) {
            stream->active = false;
            if (!stream->closed() && step(*stream)) activate(stream);
        }
        batch.clear();
        for (size_t chunks = kSteps; chunks > 0 && !local_.empty(); --chunks)
            if (!local_.back()->reduce_local_chunk()) local_.pop_back();
    }
    while (!streams_.empty()) streams_.back()->close();
    active_.clear();
    local_.clear();
    run_tasks();  // the remaining tasks, as the loop thread may wait for them
    timespec spent{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    spent_ = seconds(spent);
    current = nullptr;
}

}  // namespace p2pavg::pump
