// Receiving: a header, then [body + tag + next header] in one call that writes the body to its final address.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "blob.h"
#include "clock.h"
#include "kernels.h"
#include "lz4.h"
#include "stream.h"
#include "worker.h"

namespace p2pavg::pump {

namespace {

constexpr size_t kLowWater = 128 << 10;  // wake for at least so many bytes of a body, or for its end

}  // namespace

// Tells the kernel how many bytes must have arrived before it wakes this stream. Over a round trip above kLowWaterRttUs
// no mark is set: it is larger than the first windows, so the receiver's kernel would see a program that does not read,
// and not enlarge the windows (over 300 ms the first 20 MB on one stream then take 40 s instead of 4).
void Stream::want(size_t bytes) {
    if (no_low_water_) return;
    const int mark = static_cast<int>(std::clamp<size_t>(bytes, 1, kLowWater));
    if (mark == low_water_) return;
    low_water_ = mark;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
}

// Returns the bytes read of the body and of the tail after it; 0: no byte has arrived, or the stream failed.
ssize_t Stream::read(void *body, size_t body_bytes, bool and_tail) {
    iovec parts[2] = {{body, body_bytes}, {tail_ + tail_got_, kTailBytes - tail_got_}};
    msghdr message{};
    message.msg_iov = body_bytes ? parts : parts + 1;
    message.msg_iovlen = (body_bytes ? 1 : 0) + (and_tail ? 1 : 0);
    const size_t asked = body_bytes + (and_tail ? kTailBytes - tail_got_ : 0);
    ssize_t got;
    do got = recvmsg(fd, &message, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got == 0) {
        fail("the other side closed the stream");
        return 0;
    }
    if (got < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) fail(std::strerror(errno));
        readable_ = false;
        return 0;
    }
    // No further event follows the end of the stream, so this loop reads until the end.
    if (static_cast<size_t>(got) < asked && !ending_) readable_ = false;
    const double now = monotonic();
    bytes_received_.fetch_add(static_cast<uint64_t>(got), std::memory_order_relaxed);
    last_received_at_.store(now, std::memory_order_relaxed);
    link_->heard(now);
    if (static_cast<size_t>(got) > body_bytes) tail_got_ += static_cast<size_t>(got) - body_bytes;
    return got;
}

void Stream::receive() {
    if (!in_body_) {
        if (tail_got_ < kTailBytes && !fill_tail(kTailBytes)) return;
        begin_frame();
        if (closed_ || held_) return;
    }
    while (in_.got < in_.header.length)
        if (!fill_body()) return;
    if (tail_got_ < kTagBytes && !fill_tail(kTagBytes)) return;
    end_frame();
    if (!closed_ && !readable_) want(kTailBytes - tail_got_);
}

// Reads once. Returns false when fewer than `until` bytes of the tail have arrived.
bool Stream::fill_tail(size_t until) {
    read(nullptr, 0, true);
    if (closed_) return false;
    if (tail_got_ >= until) return true;
    want(until - tail_got_);
    return false;
}

void Stream::begin_frame() {
    const uint8_t *head = tail_ + kTagBytes;
    if (decrypting_ && (frames_received_ >= kMostFrames || !decrypting_->verify(frames_received_, head))) {
        fail("a frame header that is not authentic");
        return;
    }
    if (const char *why = read_header(head, in_.header, decrypting_ != nullptr)) {
        fail(why);
        return;
    }
    route(in_.header);
    if (held_ || closed_) return;
    std::memcpy(in_.raw, head, kHeaderBytes);
    ++frames_received_;
    tail_got_ = decrypting_ ? 0 : kTagBytes;
    in_.got = 0;
    in_body_ = true;
}

// Chooses the address for the body; sets held_ when the frame must wait for its job to begin.
void Stream::route(const Header &header) {
    using To = Incoming::To;
    in_.to = To::nowhere;
    in_.place = nullptr;
    in_.receiver.reset();
    if (header.kind == Kind::ping || header.kind == Kind::pong) {
        in_.to = To::heartbeat;
        in_.buffer = worker_.buffers().take(header.length);
        return;
    }
    auto receiver = shared_.transfers.find(header.transfer);
    if (!receiver) return;
    if (header.kind == Kind::blob) {
        auto *blob = dynamic_cast<Blob *>(receiver.get());
        if (!blob) return;
        in_.place = blob->place(header.chunk, header.length, header.flags & kFlagPacked);
        if (!in_.place) {
            fail("a blob chunk of the wrong size");
            return;
        }
        in_.slot = header.chunk;
        if (blob->landing.done(in_.slot)) return;
    } else {
        auto *job = dynamic_cast<Job *>(receiver.get());
        if (!job) return;
        const Job::Verdict verdict = job->admit(header, *link_, in_.slot);
        held_ = verdict == Job::Verdict::hold;
        if (verdict != Job::Verdict::accept) return;
        job->touch(monotonic());
        if (header.kind == Kind::contribution) {
            in_.to = To::sum;
            in_.buffer = worker_.buffers().take(header.length);
            in_.receiver = std::move(receiver);
            return;
        }
        in_.place = job->result_of(in_.slot);
    }
    // Another stream may be receiving the same chunk; this stream then uses a buffer, as it does for a packed chunk.
    if (!(header.flags & kFlagPacked) && receiver->landing.claim(in_.slot, uid)) {
        in_.to = To::place;
    } else {
        in_.to = To::buffer;
        in_.buffer = worker_.buffers().take(header.length);
    }
    in_.receiver = std::move(receiver);
}

// Reads once. Returns false when no more bytes have arrived.
bool Stream::fill_body() {
    using To = Incoming::To;
    const uint32_t rest = in_.header.length - in_.got;
    size_t here = rest;
    uint8_t *into = nullptr;
    std::shared_ptr<Receiver> entered;
    if (in_.to == To::place) {
        if (in_.receiver->landing.enter(in_.slot, uid)) {
            entered = in_.receiver;
            into = in_.place + in_.got;
        } else {
            in_.to = To::nowhere;
        }
    } else if (in_.to != To::nowhere) {
        into = in_.buffer.data() + in_.got;
    }
    if (!into) {
        here = std::min<size_t>(rest, Worker::kScratchBytes);
        into = worker_.scratch();
    }
    const uint32_t slot = in_.slot;
    const ssize_t got = read(into, here, here == rest);
    if (entered) {
        entered->landing.leave(slot, uid);
        if (closed_) entered->landing.give_up(slot, uid);
    }
    if (closed_ || got <= 0) {
        if (!closed_) want(rest + kTagBytes - tail_got_);
        return false;
    }
    in_.got += static_cast<uint32_t>(std::min<size_t>(static_cast<size_t>(got), here));
    if (in_.got == in_.header.length) return true;
    if (!readable_) want(in_.header.length - in_.got + kTagBytes - tail_got_);
    return readable_;
}

// Decrypts the body in place, or checks its checksum. header.body_crc is right afterwards.
bool Stream::intact(uint8_t *body) {
    Header &header = in_.header;
    if (!decrypting_) return p2pavg_crc32(0, body, header.length) == header.body_crc;
    if (!decrypting_->decrypt(frames_received_ - 1, in_.raw, body, header.length, tail_)) return false;
    if (header.kind == Kind::result) header.body_crc = p2pavg_crc32(0, body, header.length);
    return true;
}

// Unpacks a chunk in its buffer to the length that the receiver knows: that of the blob's chunk, or that of a count and
// codec which have been checked. header.body_crc is right afterwards. Returns false when the unpacked length is wrong.
bool Stream::unpack() {
    Header &header = in_.header;
    const auto *blob = header.kind == Kind::blob ? static_cast<const Blob *>(in_.receiver.get()) : nullptr;
    const uint32_t length =
        blob ? blob->length(header.chunk) : static_cast<uint32_t>(p2pavg_encoded_size(header.codec, header.count));
    Buffer whole = worker_.buffers().take(length);
    if (header.length == 0) std::memset(whole.data(), 0, length);
    else if (!p2pavg_lz4_unpack(in_.buffer.data(), header.length, whole.data(), length)) return false;
    worker_.buffers().give(std::move(in_.buffer));
    in_.buffer = std::move(whole);
    header.length = length;
    if (header.kind == Kind::result) header.body_crc = p2pavg_crc32(0, in_.buffer.data(), length);
    return true;
}

void Stream::end_frame() {
    using To = Incoming::To;
    in_body_ = false;
    const bool placing = in_.to == To::place && in_.receiver->landing.enter(in_.slot, uid);
    if (in_.to == To::place && !placing) in_.to = To::nowhere;
    if (in_.to == To::nowhere) {
        in_.receiver.reset();
        return;
    }
    uint8_t *body = placing ? in_.place : in_.buffer.data();
    if (!intact(body)) {
        if (placing) in_.receiver->landing.leave(in_.slot, uid);
        fail(decrypting_ ? "a frame body that is not authentic" : "a frame body whose checksum is wrong");
        return;
    }
    if (in_.header.flags & kFlagPacked) {
        if (!unpack()) {
            static constexpr const char *kWhy = "a packed chunk that does not unpack to its size";
            worker_.buffers().give(std::move(in_.buffer));
            if (in_.header.kind == Kind::blob) {
                fail(kWhy);
                return;
            }
            static_cast<Job &>(*in_.receiver).refuse(in_.header.sender, kWhy);
            in_.receiver.reset();
            return;
        }
        body = in_.buffer.data();
    }
    if (in_.header.kind == Kind::result && !static_cast<Job &>(*in_.receiver).is_sound(in_.slot, body)) {
        if (placing) {
            in_.receiver->landing.leave(in_.slot, uid);
            in_.receiver->landing.give_up(in_.slot, uid);
        }
        static_cast<Job &>(*in_.receiver).refuse(in_.header.sender, "its contribution is malformed or not finite");
        in_.receiver.reset();
        worker_.buffers().give(std::move(in_.buffer));
        return;
    }
    const double now = monotonic();
    switch (in_.to) {
    case To::heartbeat: {
        Heartbeat beat;
        if (const char *why = read_heartbeat(body, beat)) {
            fail(why);
            return;
        }
        link_->heard_ages(beat);
        if (in_.header.kind == Kind::ping) {
            link_->heard_ping(now);
            if (beat.stamp != kNoAnswer) link_->ask_pong(beat.stamp);
        } else if (now > 1e-9 * static_cast<double>(beat.stamp)) link_->heard_pong(now - 1e-9 * static_cast<double>(beat.stamp));
        break;
    }
    case To::sum: {
        auto &job = static_cast<Job &>(*in_.receiver);
        job.contribute(in_.header.sender, in_.slot, body);
        job.touch(now);
        break;
    }
    case To::place:
        in_.receiver->landing.finish(in_.slot);
        in_.receiver->landed(in_.slot, in_.header.body_crc);
        break;
    case To::buffer:
        if (!in_.receiver->landing.take_over(in_.slot)) break;
        std::memcpy(in_.place, body, in_.header.length);
        in_.receiver->landing.finish(in_.slot);
        in_.receiver->landed(in_.slot, in_.header.body_crc);
        break;
    case To::nowhere:
        break;
    }
    if (in_.header.kind == Kind::result) static_cast<Job &>(*in_.receiver).touch(now);
    worker_.buffers().give(std::move(in_.buffer));
    in_.receiver.reset();
}

}  // namespace p2pavg::pump
