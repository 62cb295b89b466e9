#include "frame.h"

#include <cstring>

#include "kernels.h"

namespace p2pavg::pump {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are written as they lie in memory");

namespace {

constexpr size_t kCrcAt = kHeaderBytes - 4;

template <typename T>
void put(uint8_t *out, T value) {
    std::memcpy(out, &value, sizeof value);
}

template <typename T>
T take(const uint8_t *in) {
    T value;
    std::memcpy(&value, in, sizeof value);
    return value;
}

}  // namespace

void write_header(const Header &header, uint8_t out[kHeaderBytes]) {
    put(out, static_cast<uint8_t>(header.kind));
    put(out + 1, header.codec);
    put(out + 2, header.flags);
    put(out + 4, header.length);
    put(out + 8, header.transfer);
    put(out + 16, header.part);
    put(out + 20, header.chunk);
    put(out + 24, header.count);
    put(out + 28, header.sender);
    put(out + 32, header.body_crc);
    put(out + kCrcAt, p2pavg_crc32(0, out, kCrcAt));
}

const char *read_header(const uint8_t in[kHeaderBytes], Header &out, bool checked) {
    if (!checked && p2pavg_crc32(0, in, kCrcAt) != take<uint32_t>(in + kCrcAt)) return "a frame header whose checksum is wrong";
    const uint8_t kind = in[0];
    if (kind < static_cast<uint8_t>(Kind::contribution) || kind > static_cast<uint8_t>(Kind::pong))
        return "a frame of unknown kind";
    out.kind = static_cast<Kind>(kind);
    out.codec = in[1];
    out.flags = take<uint16_t>(in + 2);
    const bool beat = out.kind == Kind::ping || out.kind == Kind::pong;
    if (out.flags & ~(kFlagRepeat | (beat ? 0 : kFlagPacked))) return "a frame with unknown flags";
    out.length = take<uint32_t>(in + 4);
    if (out.length > kMaxBodyBytes) return "a frame body above the limit of 4 MiB";
    if (beat && out.length != kHeartbeatBytes)
        return "a heartbeat of the wrong size";
    out.transfer = take<uint64_t>(in + 8);
    out.part = take<uint32_t>(in + 16);
    out.chunk = take<uint32_t>(in + 20);
    out.count = take<uint32_t>(in + 24);
    out.sender = take<uint32_t>(in + 28);
    out.body_crc = take<uint32_t>(in + 32);
    return nullptr;
}

void write_heartbeat(const Heartbeat &beat, uint8_t out[kHeartbeatBytes]) {
    put(out, beat.stamp);
    put(out + 8, beat.loop_age);
    put(out + 12, beat.trainer_age);
}

const char *read_heartbeat(const uint8_t in[kHeartbeatBytes], Heartbeat &out) {
    out.stamp = take<uint64_t>(in);
    out.loop_age = take<float>(in + 8);
    out.trainer_age = take<float>(in + 12);
    if (!(out.loop_age >= 0.0f && out.trainer_age >= 0.0f)) return "a heartbeat with an impossible age";
    return nullptr;
}

}  // namespace p2pavg::pump
