#include "router.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "control.h"

namespace lab {
namespace {

constexpr int kBatch = 64;               // the most packets read from one host, and written in total, per turn
constexpr Nanoseconds kEarly = 50'000;   // packets may leave so much early, as waking takes time
constexpr size_t kCopyBelow = 16384;     // shorter packets are copied to a buffer of their size
constexpr double kLongestRest = 200'000;
constexpr Nanoseconds kShortestRest = 25'000;
constexpr Nanoseconds kForever = 1'000'000'000'000;

// epoll_wait with a timeout in nanoseconds, also on kernels before 5.11. Returns the number of events.
int wait_for(int epoll, epoll_event* events, int room, Nanoseconds timeout) {
    const timespec wait{static_cast<time_t>(timeout / 1'000'000'000), static_cast<long>(timeout % 1'000'000'000)};
#ifdef SYS_epoll_pwait2
    static bool known = true;
    if (known) {
        const long n = syscall(SYS_epoll_pwait2, epoll, events, room, &wait, nullptr, size_t{0});
        if (n >= 0 || errno != ENOSYS) return static_cast<int>(n);
        known = false;
    }
#endif
    pollfd one{epoll, POLLIN, 0};
    const int n = ppoll(&one, 1, &wait, nullptr);
    return n <= 0 ? n : epoll_wait(epoll, events, room, 0);
}

void rest(Nanoseconds length) {
    const timespec wait{0, static_cast<long>(length)};
    nanosleep(&wait, nullptr);
}

}  // namespace

Nanoseconds monotonic() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return Nanoseconds{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Lateness::add(Nanoseconds late) {
    size_t i = 0;
    while (i < kBoundsUs.size() && late > kBoundsUs[i] * 1000LL) ++i;
    ++counts_[i];
}

std::string Lateness::json() const {
    std::string text = "[";
    for (size_t i = 0; i < counts_.size(); ++i) text += (i ? "," : "") + std::to_string(counts_[i]);
    return text + "]";
}

Router::Router(std::vector<HostDevice>& devices, Network& network) : devices_(devices), network_(network) {}

void Router::read_host(size_t i) {
    for (int n = 0; n < kBatch; ++n, ++moved_) {
        if (spare_ == nullptr) spare_ = pool_.get(kMaxPacket);
        const ssize_t bytes = read(devices_[i].tun, spare_->data(), kMaxPacket);
        if (bytes <= 0) return;
        Packet* packet = spare_;
        if (static_cast<size_t>(bytes) < kCopyBelow) {
            packet = pool_.get(static_cast<size_t>(bytes));
            std::memcpy(packet->data(), spare_->data(), static_cast<size_t>(bytes));
        } else {
            spare_ = nullptr;
        }
        packet->len = static_cast<uint32_t>(bytes);
        network_.admit(pool_, packet, static_cast<uint8_t>(i), monotonic());
    }
}

void Router::deliver(Nanoseconds early) {
    for (int n = 0; n < kBatch; ++n, ++moved_) {
        const Nanoseconds now = monotonic();
        Nanoseconds due;
        Packet* packet = network_.pop(pool_, now + early, &due);
        if (packet == nullptr) return;
        deliveries_.add(now - due);
        if (write(devices_[packet->dst].tun, packet->data(), packet->len) < 0) ++write_errors_;
        network_.delivered(pool_, packet);
    }
}

void Router::run(int control, int lifeline, int signals) {
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    auto watch = [epoll](int fd, uint64_t what) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = what;
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
            throw std::runtime_error(std::string("cannot watch a descriptor: ") + std::strerror(errno));
    };
    const size_t hosts = devices_.size();  // events below this number are of hosts, those above kClient of clients
    enum : uint64_t { kSignal = 1 << 16, kLifeline, kListener, kClient };
    for (size_t i = 0; i < hosts; ++i) watch(devices_[i].tun, i);
    watch(signals, kSignal);
    if (lifeline >= 0) watch(lifeline, kLifeline);
    watch(control, kListener);
    ControlServer server(devices_, network_, *this);
    std::vector<epoll_event> events(hosts + 8);

    while (true) {
        auto left = [this] {
            const Nanoseconds due = network_.next_due();
            return due == INT64_MAX ? kForever : std::max<Nanoseconds>(0, due - kEarly - monotonic());
        };
        // After a turn that transferred packets the loop rests, so that the next turn transfers more packets per system
        // call. Packets that fall due during the rest leave early. The rest is short against the shortest delay.
        Nanoseconds pause = static_cast<Nanoseconds>(std::min(kLongestRest, network_.shortest_delay_ns() / 100));
        if (moved_ == 0 || pause < kShortestRest) pause = 0;
        if (pause != 0) rest(pause);
        const int n = wait_for(epoll, events.data(), static_cast<int>(events.size()), left());
        if (n < 0 && errno != EINTR) return;
        const Nanoseconds woken = monotonic();
        moved_ = 0;
        deliver(kEarly + pause);
        for (int i = 0; i < n; ++i) {
            const uint64_t what = events[static_cast<size_t>(i)].data.u64;
            if (what < hosts) read_host(what);
        }
        turns_.add(monotonic() - woken);
        for (int i = 0; i < n; ++i) {
            const uint64_t what = events[static_cast<size_t>(i)].data.u64;
            char byte;
            if (what == kSignal) return;
            if (what == kLifeline && read(lifeline, &byte, 1) <= 0) return;
            if (what == kListener) {
                const int client = server.accept(control);
                if (client >= 0) watch(client, kClient + static_cast<uint64_t>(client));
            }
            if (what >= kClient && !server.serve(static_cast<int>(what - kClient))) return;
        }
    }
}

std::string Router::statistics() const {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const double cpu = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
                       (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    unsigned long long ran = 0, waited = 0;
    if (FILE* file = std::fopen("/proc/self/schedstat", "r")) {
        if (std::fscanf(file, "%llu %llu", &ran, &waited) != 2) waited = 0;
        std::fclose(file);
    }
    uint64_t drops = 0;
    for (const HostDevice& device : devices_) drops += kernel_drops(device);
    char head[512];
    std::snprintf(head, sizeof head,
                  "\"seconds\":%.6f,\"cpu_s\":%.6f,\"run_queue_s\":%.6f,\"kernel_drops\":%llu,"
                  "\"write_errors\":%llu,\"in_flight\":%zu,\"buffer_bytes\":%llu,\"priority\":\"%s\",",
                  static_cast<double>(monotonic() - started_) * 1e-9, cpu, static_cast<double>(waited) * 1e-9,
                  static_cast<unsigned long long>(drops), static_cast<unsigned long long>(write_errors_),
                  network_.in_flight(), static_cast<unsigned long long>(pool_.held_bytes()), priority);
    return std::string("{") + head + "\"late\":" + deliveries_.json() + ",\"turns\":" + turns_.json() + ",";
}

}  // namespace lab
