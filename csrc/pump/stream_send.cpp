// Sending: a stream takes one frame at a time from its link when the socket is writable.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "clock.h"
#include "kernels.h"
#include "lz4.h"
#include "stream.h"
#include "worker.h"

namespace p2pavg::pump {

namespace {

constexpr double kWorthPacking = 0.9;  // a packed chunk above this share of its bytes is sent unpacked
constexpr size_t kRemembered = 8;  // acknowledged frames that are sent again when the stream is lost

float age(const std::atomic<double> &seen, double now) {
    const double at = seen.load(std::memory_order_relaxed);
    return at > 0 ? static_cast<float>(std::max(0.0, now - at)) : std::numeric_limits<float>::infinity();
}

// Whether the receiver of a chunk still needs it for the chunk's job.
bool wanted_still(const Item &item) {
    if (item.job->over.load(std::memory_order_acquire)) return false;
    return !item.job->finished() || !item.job->is_voter(item.rank);
}

}  // namespace

void Stream::transmit() {
    if (!out_.loaded) {
        if (encrypting_ && frames_begun_ == kMostFrames) {
            fail("its keys are used up");
            return;
        }
        wanted_.store(false);
        if (!link_->pop(out_.item, shared_from_this())) {
            idle_ = true;
            return;
        }
        if (!load()) return;
    }
    const size_t whole = kHeaderBytes + out_.length;
    size_t most = whole - out_.sent;
    const bool limited = shared_.limiter.on() && out_.item.kind != Kind::ping && out_.item.kind != Kind::pong;
    if (limited) {
        const double now = monotonic();
        double retry_in = 0;
        most = shared_.limiter.take(most, now, retry_in);
        if (most == 0) {
            throttled_until_ = now + retry_in;
            worker_.throttle(shared_from_this());
            return;
        }
    }
    iovec parts[2];
    int count = 0;
    size_t room = most;
    if (out_.sent < kHeaderBytes) {
        parts[count] = {out_.header + out_.sent, std::min(room, kHeaderBytes - out_.sent)};
        room -= parts[count++].iov_len;
    }
    if (room) {
        const size_t from = out_.sent > kHeaderBytes ? out_.sent - kHeaderBytes : 0;
        parts[count++] = {const_cast<uint8_t *>(out_.body) + from, room};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    ssize_t put;
    do put = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (put < 0 && errno == EINTR);
    if (put < 0) {
        if (limited) shared_.limiter.give_back(most);
        if (errno == EAGAIN || errno == EWOULDBLOCK) writable_ = false;
        else fail(std::strerror(errno));
        return;
    }
    const auto done = static_cast<size_t>(put);
    if (done < most) {
        writable_ = false;
        if (limited) shared_.limiter.give_back(most - done);
    }
    bytes_sent_.fetch_add(done, std::memory_order_relaxed);
    if (out_.sent == 0 && done) ++frames_begun_;  // until its first byte is sent, a frame's nonce may be used again
    out_.sent += done;
    if (out_.item.job) out_.item.job->touch(monotonic());
    if (out_.sent == whole) delivered();
}

// Makes the frame of out_.item. Returns false when the item needs no frame any more.
bool Stream::load() {
    Item &item = out_.item;
    Header header;
    header.kind = item.kind;
    header.flags = item.repeat ? kFlagRepeat : 0;
    out_.sent = 0;
    if (item.job) {
        const Job &job = *item.job;
        if (!wanted_still(item)) {
            item = {};
            return false;
        }
        const Chunk &chunk = job.chunk(item.chunk);
        header.transfer = job.transfer;
        header.part = chunk.part;
        header.chunk = chunk.index;
        header.count = chunk.count;
        header.sender = job.spec.rank;
        if (item.kind == Kind::contribution) {
            bool finite = true;
            load_contribution(job, header, finite);
            if (!finite) {
                item.job->refuse(job.spec.rank, "its contribution is not finite");
                worker_.buffers().give(std::move(out_.buffer));
                item = {};
                return false;
            }
        } else {
            header.codec = static_cast<uint8_t>(job.spec.result_codec);
            header.length = chunk.result_length;
            header.body_crc = job.result_crc(item.chunk);
            out_.body = job.result_of(item.chunk);
        }
    } else if (item.blob) {
        header.transfer = item.blob->transfer;
        header.chunk = item.blob->chunk;
        header.length = item.blob->length;
        out_.body = item.blob->data;
        pack(header);
        if (!encrypting_ && !(header.flags & kFlagPacked)) header.body_crc = p2pavg_crc32(0, out_.body, header.length);
    } else {
        const double now = monotonic();
        write_heartbeat({item.stamp, age(shared_.loop_seen, now), age(shared_.trainer_seen, now)}, out_.heartbeat);
        header.length = kHeartbeatBytes;
        if (!encrypting_) header.body_crc = p2pavg_crc32(0, out_.heartbeat, kHeartbeatBytes);
        out_.body = out_.heartbeat;
    }
    if (item.job) pack(header);
    out_.length = header.length;
    out_.repeated = false;
    write_header(header, out_.header);
    if (encrypting_) encrypt(header);
    out_.loaded = true;
    return true;
}

// Packs the chunk in out_.body where packing takes less time than it saves. A chunk of zeros needs no packing.
void Stream::pack(Header &header) {
    const double speed = p2pavg_lz4_speed();
    if (header.length == 0 || speed == 0.0) return;
    double left = 0.0;
    if (!p2pavg_all_zero(out_.body, header.length)) {
        const double rate = shared_.limiter.on() ? 0.0 : link_rate();
        if (rate >= speed) return;
        left = p2pavg_lz4_sample(out_.body, header.length);
        if (left > kWorthPacking || rate >= speed * (1.0 - left)) return;
    }
    Buffer packed = worker_.buffers().take(header.length + kTagBytes);
    size_t length = 0;
    if (left > 0.0) {
        const auto room = static_cast<size_t>(kWorthPacking * header.length);
        length = p2pavg_lz4_pack(out_.body, header.length, packed.data(), room);
        if (length == 0) {
            worker_.buffers().give(std::move(packed));
            return;
        }
    }
    worker_.buffers().give(std::move(out_.buffer));
    out_.buffer = std::move(packed);
    out_.body = out_.buffer.data();
    shared_.spared.fetch_add(header.length - length, std::memory_order_relaxed);
    header.flags |= kFlagPacked;
    header.length = static_cast<uint32_t>(length);
    header.body_crc = encrypting_ ? 0 : p2pavg_crc32(0, out_.body, length);
}

// Estimates bytes/s of the link as this stream's rate times the number of streams; 0 when the rate is not known yet.
double Stream::link_rate() const {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0.0;
    return static_cast<double>(info.tcpi_delivery_rate) * static_cast<double>(link_->open_streams());
}

void Stream::encrypt(const Header &header) {
    if (!out_.buffer) out_.buffer = worker_.buffers().take(header.length + kTagBytes);
    encrypting_->sign(frames_begun_, out_.header);
    encrypting_->encrypt(frames_begun_, out_.header, out_.body, header.length, out_.buffer.data());
    out_.body = out_.buffer.data();
    out_.length = header.length + static_cast<uint32_t>(kTagBytes);
}

void Stream::load_contribution(const Job &job, Header &header, bool &finite) {
    const Chunk &chunk = job.chunk(out_.item.chunk);
    const bool partial = job.sends_partial(out_.item.chunk);
    header.codec = static_cast<uint8_t>(partial ? job.spec.result_codec : job.spec.contribution_codec);
    header.length = partial ? chunk.result_length : chunk.encoded_length;
    const Start &start = job.begun_with();
    if (partial) {
        out_.body = job.partial_of(out_.item.chunk);
    } else if (start.encoded) {
        out_.body = start.encoded + chunk.encoded_at;
    } else if (job.spec.contribution_codec == P2PAVG_NONE && start.scale == 1.0) {
        out_.body = reinterpret_cast<const uint8_t *>(start.source + chunk.first);  // sent without a copy
        finite = p2pavg_finite_crc32(start.source + chunk.first, chunk.count, &header.body_crc) != 0;
        if (encrypting_) header.body_crc = 0;
        return;
    } else {
        out_.buffer = worker_.buffers().take(chunk.encoded_length + kTagBytes);
        finite = p2pavg_encode(job.spec.contribution_codec, start.source + chunk.first, chunk.count,
                               static_cast<float>(start.scale), out_.buffer.data()) != 0;
        out_.body = out_.buffer.data();
    }
    if (finite && !encrypting_) header.body_crc = p2pavg_crc32(0, out_.body, header.length);
}

// Called when the kernel has taken the whole frame.
void Stream::delivered() {
    out_.loaded = false;
    worker_.buffers().give(std::move(out_.buffer));
    Item item = std::move(out_.item);
    out_.item = {};
    if (item.job) {
        item.job->sent(item);
        deliveries_.push_back({bytes_sent_.load(std::memory_order_relaxed), std::move(item), out_.repeated});
        forget_acknowledged(kRemembered);
    } else if (item.blob) {
        shared_.events.post({Event::Type::blob_sent, link_->id, 0, item.blob->transfer, item.blob->chunk, {}});
    }
}

// Forgets frames that the other side's kernel has acknowledged, but not the last `keep`.
void Stream::forget_acknowledged(size_t keep) {
    if (deliveries_.size() <= keep) return;
    const uint64_t acked = acknowledged();
    while (deliveries_.size() > keep && deliveries_.front().end <= acked) deliveries_.pop_front();
}

// The number of sent bytes that the other side's kernel has; 0 when this side's kernel does not know.
uint64_t Stream::acknowledged() const {
    int queued = 0;
    if (ioctl(fd, SIOCOUTQ, &queued) != 0) return 0;
    // The queue may also hold bytes from before the stream was attached, which bytes_sent_ does not count.
    const uint64_t sent = bytes_sent_.load(std::memory_order_relaxed), waiting = static_cast<uint64_t>(queued);
    return sent > waiting ? sent - waiting : 0;
}

void Stream::repeat() {
    if (closed_ || shared_.limiter.on()) return;  // an upload limit makes bytes costlier than time
    const uint64_t acked = acknowledged();
    std::vector<Item> items;
    auto again = [&](const Item &item, bool &repeated) {
        if (repeated || item.not_over || !wanted_still(item)) return;
        repeated = true;
        items.push_back(item);
        items.back().repeat = true;
    };
    for (Delivery &delivery : deliveries_)
        if (delivery.end > acked) again(delivery.item, delivery.repeated);
    if (out_.loaded && out_.item.job) again(out_.item, out_.repeated);
    link_->push_elsewhere(std::move(items), shared_from_this());
}

// The frames that the other side may not have: the frame sent in part, whole frames that its kernel has not
// acknowledged, and the last acknowledged ones, which its program may not have read. It drops frames that it has.
std::vector<Item> Stream::undelivered() {
    std::vector<Item> items;
    for (Delivery &delivery : deliveries_) {
        if (delivery.repeated || !wanted_still(delivery.item)) continue;
        delivery.item.repeat = true;
        items.push_back(std::move(delivery.item));
    }
    deliveries_.clear();
    if (out_.loaded && !out_.repeated && (out_.item.job || out_.item.blob)) items.push_back(std::move(out_.item));
    out_.loaded = false;
    out_.item = {};
    return items;
}

}  // namespace p2pavg::pump
