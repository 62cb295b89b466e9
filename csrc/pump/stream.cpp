#include "stream.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>

#include "clock.h"
#include "worker.h"

namespace p2pavg::pump {

namespace {

constexpr uint32_t kLowWaterRttUs = 2000;  // microseconds: over a longer round trip no low-water mark is set
constexpr int kNotSentLowWater = 256 << 10;  // unsent bytes that a stalled stream's kernel may hold
constexpr int kLeastUnsent = 16 << 10;         // the least unsent bytes that the kernel of a slow stream may hold
constexpr double kUnlimited = 1e15;            // bytes/s
constexpr uint64_t kTimestampBytes = 12;  // of TCP timestamps in each segment, where both sides agreed to them
constexpr double kHeldSeconds = 0.05;          // of its rate a paced stream may hold: threads may run late

// Bytes of the IP and TCP headers of a segment.
uint64_t header_bytes(int fd) {
    sockaddr_in6 address{};
    socklen_t size = sizeof address;
    const bool known = getpeername(fd, reinterpret_cast<sockaddr *>(&address), &size) == 0;
    return known && address.sin6_family == AF_INET6 && !IN6_IS_ADDR_V4MAPPED(&address.sin6_addr) ? 60 : 40;
}

std::unique_ptr<Cipher> cipher(const std::string &key, Cipher::Direction direction) {
    return key.empty() ? nullptr : std::make_unique<Cipher>(key, direction);
}

}  // namespace

Stream::Stream(uint64_t uid, int64_t id, int fd, std::shared_ptr<Link> link, Worker &worker, Shared &shared, StreamKeys keys)
    : uid(uid), id(id), fd(fd), link_(std::move(link)), worker_(worker), shared_(shared), header_bytes_(header_bytes(fd)),
      encrypting_(cipher(keys.sending, Cipher::Direction::encrypt)),
      decrypting_(cipher(keys.receiving, Cipher::Direction::decrypt)) {
    const int on = 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kNotSentLowWater, sizeof kNotSentLowWater) != 0 ||
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
        throw std::system_error(errno, std::generic_category(), "a data stream must be a connected TCP socket");
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
        arrived_before_ = info.tcpi_bytes_received;
        no_low_water_ = info.tcpi_rtt > kLowWaterRttUs;
    }
    if (!shared_.descriptors.add(fd)) throw std::system_error(EMFILE, std::generic_category(), "too many streams");
}

Stream::~Stream() {
    shared_.descriptors.remove(fd);
    ::close(fd);
}

void Stream::wake() {
    if (worker_.is_current()) {
        idle_ = false;
        worker_.activate(shared_from_this());
        return;
    }
    if (wanted_.exchange(true)) return;
    worker_.post([self = shared_from_this()] {
        self->idle_ = false;
        self->worker_.activate(self);
    });
}

void Stream::ready(bool readable, bool writable, bool ending) {
    ending_ = ending_ || ending;
    readable_ = readable_ || readable;
    writable_ = writable_ || writable;
}

bool Stream::step() {
    if (readable_ && !held_) receive();
    if (closed_) return false;
    if (writable_ && !idle_ && throttled_until_ == 0) transmit();
    if (closed_) return false;
    return (readable_ && !held_) || (writable_ && !idle_ && throttled_until_ == 0);
}

void Stream::release(const Receiver *receiver) {
    if (in_.receiver.get() == receiver) {
        if (in_.to == Incoming::To::place) in_.receiver->landing.give_up(in_.slot, uid);
        in_.to = Incoming::To::nowhere;
        in_.receiver.reset();
    }
    for (size_t i = deliveries_.size(); i-- > 0;)
        if (deliveries_[i].item.job.get() == receiver) deliveries_.erase(deliveries_.begin() + static_cast<ptrdiff_t>(i));
    if (out_.loaded && out_.item.job && out_.item.job.get() == receiver) {
        detach_body();
        out_.item.job.reset();
    }
}

void Stream::release_blob(uint64_t transfer) {
    if (!out_.loaded || !out_.item.blob || out_.item.blob->transfer != transfer) return;
    detach_body();
    out_.item.blob.reset();
}

void Stream::settle(const Job *job) {
    if (out_.loaded && out_.item.job.get() == job && out_.item.kind == Kind::contribution) detach_body();
}

// Copies the rest of a frame whose header has been sent, because the memory of its body is about to be freed.
void Stream::detach_body() {
    if (out_.sent == 0) {
        out_.loaded = false;
        worker_.buffers().give(std::move(out_.buffer));
        return;
    }
    if (out_.buffer) return;
    const size_t from = out_.sent > kHeaderBytes ? out_.sent - kHeaderBytes : 0;
    out_.buffer = worker_.buffers().take(out_.length);
    std::memcpy(out_.buffer.data() + from, out_.body + from, out_.length - from);
    out_.body = out_.buffer.data();
}

void Stream::fail(const std::string &reason) {
    if (closed_) return;
    auto self = shared_from_this();
    close();
    shared_.events.post({Event::Type::stream_closed, link_->id, uid, 0, 0, reason});
}

void Stream::detach() {
    readable_ = true;
    for (int frames = 0; frames < 64 && readable_ && !held_ && !closed_; ++frames) receive();
    if (!closed_) forget_acknowledged(0);  // the other side reads all that it has acknowledged
    close();
}

void Stream::close() {
    if (closed_) return;
    closed_ = true;
    auto self = shared_from_this();
    if (in_.receiver && in_.to == Incoming::To::place) in_.receiver->landing.give_up(in_.slot, uid);
    in_ = {};
    worker_.drop(*this);
    link_->remove(this);
    std::vector<Item> back = undelivered();
    worker_.buffers().give(std::move(out_.buffer));
    ::shutdown(fd, SHUT_RDWR);
    // Closes the socket at once, or the kernel would go on acknowledging unread bytes; fd itself stays reserved until
    // the destructor.
    ::dup2(shared_.events.fd(), fd);
    link_->push_front(std::move(back));
    link_->wake();  // this stream may have been woken for a frame that it does not send
}

void Stream::pace(double bytes_per_second) {
    const uint64_t most = bytes_per_second < kUnlimited ? static_cast<uint64_t>(bytes_per_second) : ~0ull;
    const double held = std::min(bytes_per_second * kHeldSeconds, static_cast<double>(kNotSentLowWater));
    const int unsent = std::max(kLeastUnsent, static_cast<int>(held));
    setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof most);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
}

StreamStats Stream::counters() const {
    StreamStats out;
    out.stream = id;
    out.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
    out.bytes_received = bytes_received_.load(std::memory_order_relaxed);
    out.last_received_at = last_received_at_.load(std::memory_order_relaxed);
    return out;
}

Wire Stream::wire() const {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
        size < offsetof(tcp_info, tcpi_bytes_sent) + sizeof info.tcpi_bytes_sent)
        return {bytes_sent_.load(std::memory_order_relaxed), bytes_received_.load(std::memory_order_relaxed)};
    const uint64_t header = header_bytes_ + (info.tcpi_options & TCPI_OPT_TIMESTAMPS ? kTimestampBytes : 0);
    return {info.tcpi_bytes_sent + header * info.tcpi_segs_out, info.tcpi_bytes_received + header * info.tcpi_segs_in};
}

StreamStats Stream::stats() const {
    StreamStats out = counters();
    int queued = 0;
    if (ioctl(fd, SIOCOUTQ, &queued) == 0) out.unacked = static_cast<uint64_t>(queued);
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
        // The kernel's counters include bytes below the low-water mark, which this stream has not read.
        if (info.tcpi_bytes_received > arrived_before_) {
            out.last_received_at = std::max(out.last_received_at, monotonic() - 1e-3 * info.tcpi_last_data_recv);
            const uint64_t arrived = info.tcpi_bytes_received - arrived_before_;
            out.unread = arrived > out.bytes_received ? arrived - out.bytes_received : 0;
        }
        out.rtt = 1e-6 * info.tcpi_rtt;
        out.window = static_cast<uint64_t>(info.tcpi_snd_cwnd) * info.tcpi_snd_mss;
        out.delivery_rate = 8.0 * static_cast<double>(info.tcpi_delivery_rate);
        out.retransmits = info.tcpi_total_retrans;
        out.unsent = std::min<uint64_t>(out.unacked, info.tcpi_notsent_bytes);
        out.unacked -= out.unsent;
    }
    return out;
}

}  // namespace p2pavg::pump
