#include "router.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "control.h"

namespace lab {
namespace {

constexpr int kBatch = 64;               // packets read from one host, and written in all, before the others' turn
constexpr Nanoseconds kEarly = 50'000;   // what waking up costs, here and in the receiver: a packet may leave so early
constexpr size_t kCopyBelow = 16384;     // shorter packets move to a buffer of their size

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
    for (int n = 0; n < kBatch; ++n) {
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

void Router::deliver() {
    for (int n = 0; n < kBatch; ++n) {
        const Nanoseconds now = monotonic();
        Nanoseconds due;
        Packet* packet = network_.pop(pool_, now + kEarly, &due);
        if (packet == nullptr) return;
        deliveries_.add(now - due);
        if (write(devices_[packet->dst].tun, packet->data(), packet->len) < 0) ++write_errors_;
        network_.delivered(pool_, packet);
    }
}

void Router::run(int control, int lifeline, int signals) {
    std::vector<pollfd> fds;
    for (const HostDevice& device : devices_) fds.push_back({device.tun, POLLIN, 0});
    const size_t hosts = fds.size();
    fds.push_back({signals, POLLIN, 0});
    fds.push_back({lifeline, POLLIN, 0});  // -1 is ignored by poll
    fds.push_back({control, POLLIN, 0});
    ControlServer server(devices_, network_, *this);

    while (true) {
        const Nanoseconds due = network_.next_due();
        timespec wait{1000, 0};
        if (due != INT64_MAX) {
            const Nanoseconds left = std::max<Nanoseconds>(0, due - kEarly - monotonic());
            wait = {static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
        }
        fds.resize(hosts + 3);
        server.add_clients(fds);
        if (ppoll(fds.data(), fds.size(), &wait, nullptr) < 0 && errno != EINTR) return;
        const Nanoseconds woken = monotonic();
        deliver();
        for (size_t i = 0; i < hosts; ++i) {
            if (fds[i].revents != 0) read_host(i);
        }
        turns_.add(monotonic() - woken);
        if (fds[hosts].revents != 0) return;
        if (fds[hosts + 1].revents != 0) {
            char byte;
            if (read(lifeline, &byte, 1) <= 0) return;
        }
        if (fds[hosts + 2].revents != 0) server.accept(control);
        if (server.has_clients() && !server.serve(fds, hosts + 3)) return;
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
